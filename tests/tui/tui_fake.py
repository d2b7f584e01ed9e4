"""A supervisor for the dashboard's tests: the protocol over a real Unix socket, and data that a real one could send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

NOW = 1_790_000_000.0
"""2026-09-21 14:13:20 UTC."""

HELLO: dict[str, Any] = {
    "type": "hello",
    "schema_version": 1,
    "server_version": "0.1.0",
    "node": "atlas-3",
    "pid": 4242,
}


def gate(
    name: str, *, is_open: bool = True, reading: str = "", limit: str = "", at: float | None = None
) -> dict[str, Any]:
    return {"gate": name, "open": is_open, "reading": reading, "limit": limit, "next_change_at": at}


def node(state: str = "EARNING", **changes: Any) -> dict[str, Any]:
    return {
        "id": "node-7f3a",
        "name": "atlas-3",
        "version": "0.1.0",
        "state": state,
        "state_since": NOW - 754,
        "started_at": NOW - 274_320,
        "why": [
            gate("user_pause", reading="not paused"),
            gate("devices", reading="2 of 2 usable", limit="at least 1 usable"),
            gate("hub", reading="connected", limit="connected"),
            gate("workers", reading="no worker in trouble"),
        ],
        **changes,
    }


def hub(state: str = "connected", **changes: Any) -> dict[str, Any]:
    return {
        "state": state,
        "address": "hub.example.net:50051",
        "rtt_ms": 23.4 if state == "connected" else None,
        "since": NOW - 9000,
        "next_retry_at": None,
        "error": None,
        **changes,
    }


def device(device_id: str = "cpu", **changes: Any) -> dict[str, Any]:
    return {
        "id": device_id,
        "kind": "cpu",
        "name": "AMD Ryzen 9 7950X",
        "usable": True,
        "reason": None,
        "slots": 2,
        "utilization": 0.62,
        "memory_used": 18 << 30,
        "memory_total": 64 << 30,
        "temperature_c": None,
        "power_w": None,
        "power_limit_w": None,
        "workers": [],
        "unavailable": {"temperature_c": "no sensor", "power_w": "no sensor"},
        **changes,
    }


def gpu(**changes: Any) -> dict[str, Any]:
    facts = {
        "kind": "cuda",
        "name": "NVIDIA RTX 4090",
        "slots": 1,
        "utilization": 0.94,
        "memory_used": int(18.2 * (1 << 30)),
        "memory_total": 24 << 30,
        "temperature_c": 72.0,
        "power_w": 318.0,
        "power_limit_w": 450.0,
        "workers": ["w-1"],
        "unavailable": {},
    }
    return device("gpu0", **(facts | changes))


def worker(rank: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"w-{rank}",
        "job": "job-1",
        "job_name": "llama-1b",
        "epoch": 1,
        "rank": rank,
        "stages": [rank % 2],
        "device": "gpu0" if rank == 1 else "cpu",
        "state": "running",
        "pid": 5000 + rank,
        "step": 18204,
        "loss": 2.4131,
        "tokens_per_second": 4812.0,
        "compute_s": 0.41,
        "sync_s": 0.12,
        "wait_s": 0.05,
        "restarts": 0,
        "last_exit": None,
        "rss": 812 << 20,
        "since": NOW - 700,
        **changes,
    }


def member(
    rank: int, node_name: str, *, dp: int, pp: int, mine: bool = False, tp: int = 0, cp: int = 0
) -> dict[str, Any]:
    return {"rank": rank, "node_id": node_name, "node": node_name, "dp": dp, "tp": tp, "pp": pp, "cp": cp, "mine": mine}


def link(
    rank: int,
    peer: int,
    sent_rate: float | None = 1.2e6,
    received_rate: float | None = 9.1e5,
    rtt_ms: float | None = 3.2,
    age: float | None = 0.0,
) -> dict[str, Any]:
    return {
        "from": rank,
        "to": peer,
        "sent": 86 << 20,
        "received": 61 << 20,
        "sent_rate": sent_rate,
        "received_rate": received_rate,
        "rtt_ms": rtt_ms,
        "rtt_age_s": age,
    }


def job(**changes: Any) -> dict[str, Any]:
    return {
        "id": "job-1",
        "name": "llama-1b",
        "state": "running",
        "epoch": 1,
        "step": 18204,
        "total_steps": 20000,
        "loss": 2.4131,
        "tokens_per_second": 4812.0,
        "parallel": {"dp": 2, "tp": 1, "pp": 2, "cp": 1, "order": "dp-pp-cp-tp"},
        "members": [
            member(0, "bolt-1", dp=0, pp=0),
            member(1, "atlas-3", dp=0, pp=1, mine=True),
            member(2, "atlas-3", dp=1, pp=0, mine=True),
            member(3, "kite-2", dp=1, pp=1),
        ],
        "links": [
            link(1, 0),
            link(2, 3, 4.2e5, 3.9e5, 41.4, 40.0),
            link(1, 3, 2.1e6, 2.1e6, 0.4),
            link(1, -1, 12_000, 640),
        ],
        "units": 1840,
        **changes,
    }


def earnings(**changes: Any) -> dict[str, Any]:
    return {
        "confirmed_micro": 12_345_000,
        "confirmed_units": 3086,
        "pending_units": 6,
        "today_micro": 1_840_000,
        "confirmed_at": NOW - 2,
        "price_note": "1 unit = 1000 micro-credits per micro-batch",
        **changes,
    }


def income_sum(micro: int = 0, units: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "units": units,
        "micro": micro,
        "millijoules": None,
        "fixed_millijoules": 0,
        "work_ms": 0,
        "unmeasured_ms": 0,
        "cost_micro": None,
        "worth_micro": None,
        "net_micro": None,
        **changes,
    }


def used(micro: int, units: int, kwh: float) -> dict[str, Any]:
    """With energy at 0.30 EUR a kWh and 2 credits for 1 EUR."""
    cost = round(300_000 * kwh)
    return income_sum(
        micro,
        units,
        millijoules=round(kwh * 3.6e9),
        work_ms=round(kwh * 12e6),
        cost_micro=cost,
        worth_micro=micro // 2,
        net_micro=micro // 2 - cost,
    )


def standing(units: int = 0, micro: int = 0, since: float | None = None) -> dict[str, Any]:
    return {"units": units, "micro": micro, "micro_batches": 4 * units, "since": since}


def ledger(state: str = "equal", **changes: Any) -> dict[str, Any]:
    return {
        "state": state,
        "reason": None,
        "at": NOW - 680,
        "own_micro": 12_345_000,
        "hub_micro": 12_345_000,
        "matched": standing(3086, 12_345_000, NOW - 90_000),
        "unconfirmed": standing(6, 0, NOW - 12),
        "refused": standing(),
        "missing_here": standing(),
        "missing_there": standing(),
        **changes,
    }


def income(**changes: Any) -> dict[str, Any]:
    """Three days of work; their sums are those of `earnings`."""
    days = [{"day": f"2026-09-{day:02}", **income_sum()} for day in range(1, 19)]
    days = [{"day": f"2026-08-{day:02}", **income_sum()} for day in range(23, 32)] + days
    days += [
        {"day": "2026-09-19", **used(6_404_999, 1601, 1.9)},
        {"day": "2026-09-20", **used(4_100_001, 1025, 1.2)},
        {"day": "2026-09-21", **used(1_840_000, 460, 0.42)},
    ]
    total = used(12_345_000, 3086, 3.52)
    return {
        "today": used(1_840_000, 460, 0.42),
        "week": total,
        "month": total,
        "total": total,
        "hours": [0] * 20 + [100_000 + 3_000 * i for i in range(28)],
        "days": days,
        "jobs": [
            {"id": "job-1", "name": "llama-1b", **income_sum(8_345_000, 2086)},
            {"id": "job-0", "name": "tiny-stories", **income_sum(4_000_000, 1000)},
        ],
        "devices": [
            {"id": "gpu0", "name": "gpu0", **used(10_345_000, 2586, 3.52)},
            {"id": "cpu", "name": "cpu", **income_sum(2_000_000, 500, work_ms=9_000_000, unmeasured_ms=9_000_000)},
        ],
        "projection": {"month_micro": 157_575_000, "from_days": 2},
        "pending_units": 6,
        "payable_micro": 4_000_000,
        "paid_micro": 2_000_000,
        "money": {
            "credited": 12_345_000,
            "pending": 6_000_000,
            "held": 45_000,
            "payable": 4_000_000,
            "clearing": 300_000,
            "paid": 2_000_000,
            "void": 0,
            "fees": 123_450,
        },
        "payout_note": "a credit is payable when nobody can challenge it any more; whoever runs the hub pays it out",
        "ledger": ledger(),
        "tariff": {"price_micro": 300_000, "currency": "EUR", "credits_micro": 2_000_000},
        "no_power": {"cpu": "no RAPL counter can be read"},
        **changes,
    }


def event(ago: float, text: str, severity: str = "info", source: str = "worker") -> dict[str, Any]:
    return {"at": NOW - ago, "severity": severity, "source": source, "text": text}


def events() -> list[dict[str, Any]]:
    return [
        event(754, "joined the hub hub.example.net:50051", source="hub"),
        event(730, "assigned ranks 1 and 2 of llama-1b, epoch 1", source="hub"),
        event(722, "rank 1 is ready on gpu0"),
        event(721, "rank 2 is ready on cpu"),
        event(300, "rank 2 was killed by signal 9 (SIGKILL); restart 1", "warning"),
        event(4, "checkpoint of step 18200 written", source="job"),
    ]


def setting(key: str, value: Any, help_: str, **changes: Any) -> dict[str, Any]:
    return {
        "key": key, "device": None, "value": value, "default": value, "unit": "", "kind": "number",
        "expected": "0 to 1000", "per_device": False, "source": "default", "help": help_, **changes,
    }  # fmt: skip


OWNERS_FILE = "/home/me/.local/state/distensor/server/limits.toml"


def limits() -> dict[str, Any]:
    """Some of the settings, one of them changed by the owner, one from the configuration file."""
    return {
        "file": OWNERS_FILE,
        "rows": [
            setting("schedule", "", "when this node may work, by the local clock; empty: at any time", per_device=True,
                    expected='times such as "mon-fri 18:00-08:00"'),
            setting("only_when_idle", False, "work only while nobody uses this machine", expected="true or false"),
            setting(
                "temperature_max_c", 80.0, "above it work slows down, and stops when that does not help; 0: no limit",
                unit="C", default=0.0, per_device=True, source=f"file {OWNERS_FILE}", expected="0 to 120 C",
            ),
            setting("power_max_w", 0.0, "above it work slows down first; 0: no limit", unit="W", per_device=True),
            setting(
                "cpu_workers", 2, "how many workers may run on the CPU", default=1, source="file /etc/distensor/s.toml",
            ),
            setting("strict", ["battery", "disk"], "gates that close when their reading cannot be had", default=[]),
        ],
    }  # fmt: skip


def snapshot(**sections: Any) -> dict[str, Any]:
    """A node that earns: two devices, two workers, one job over three nodes."""
    return {
        "node": node(),
        "hub": hub(),
        "devices": [gpu(), device(workers=["w-2"])],
        "workers": [worker(1), worker(2, restarts=1, last_exit="killed by signal 9 (SIGKILL)")],
        "jobs": [job()],
        "earnings": earnings(),
        "income": income(),
        "limits": limits(),
        "events": events(),
        "usage": usage(),
        **sections,
    }


def usage(**changes: Any) -> dict[str, Any]:
    return {"duty": {"gpu0": 1.0, "cpu": 1.0}, "bytes_day": 3_240_000_000, "bytes_month": 41_200_000_000, **changes}


def fault(part: str, subject: str | None, code: str, cause: str, fix: str, **changes: Any) -> dict[str, Any]:
    return {"part": part, "subject": subject, "code": code, "cause": cause, "fix": fix, "log": "distensor logs",
            "since": NOW - 120, "retry_at": None, **changes}  # fmt: skip


CRASH_LOOP = fault(
    "worker", "w-2", "crash_loop", "rank 2 of llama-1b: out of memory (exit 137), 5 times in a row",
    "`distensor retry w-2` (b in the dashboard) starts it again; it needs more memory than it gets: "
    "fewer workers here, or a smaller part of the model", log="distensor logs --worker w-2",
)  # fmt: skip
DEVICE_LOST = fault(
    "device", "gpu1", "device_lost", "the driver says that it fell off the bus (NVML error 15)",
    "it is used again as soon as it answers; if it does not, see `distensor doctor`, then restart the machine",
    since=None,
)  # fmt: skip
DISK_FULL = fault(
    "disk", None, "disk_full", "cannot write receipts/2026-09-21.jsonl: No space left on device",
    "free some space there; work goes on, and the hub's books count",
)  # fmt: skip
REFUSED = fault(
    "hub", None, "authentication", "the hub does not know this node",
    "Ask the hub's operator for a new join token and give it to the node: distensor auth login", retry_at=NOW + 60,
)  # fmt: skip


def hostile() -> dict[str, Any]:
    """Every text that a stranger can choose is one that crashes naive markup."""
    words = ["[00] x", "[red]", "[/]", "[b"]
    bad = " ".join(words)
    return snapshot(
        node=node("PAUSED", name="[red]n[/]", why=[gate("[b", is_open=False, reading=bad, limit="[/]")]),
        hub=hub("offline", error={"code": "[b", "message": bad, "fix": "[/]"}),
        devices=[gpu(name="[00] x"), device("[b", usable=False, reason="[/] [red]")],
        workers=[worker(1, job_name="[b", state="[red]", last_exit="[/]"), worker(2)],
        jobs=[job(name="[00] x", members=[member(0, "[/]", dp=0, pp=0), member(1, "[b", dp=0, pp=1, mine=True)])],
        earnings=earnings(price_note=bad),
        income=income(payout_note=bad, jobs=[{"id": "[b", "name": "[/]", **income_sum(1, 1)}], no_power={"[b": bad}),
        events=[event(i, word, source="[b") for i, word in enumerate(words)],
    )


Responder = Callable[[dict[str, Any]], dict[str, Any]]


def agree(request: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "result": {}}


class FakeSupervisor:
    """Serves one socket. `requests` holds what clients asked; `push` sends an update to all of them."""

    def __init__(self, path: Path, data: dict[str, Any] | None = None, hello: dict[str, Any] | None = None) -> None:
        self.path, self.data, self.hello = path, data if data is not None else snapshot(), hello or HELLO
        self.requests: list[dict[str, Any]] = []
        self.respond: Responder = agree
        self.mute = False
        """Requests are kept, not answered, until `answer_late`."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.AbstractServer | None = None
        self._seq = 1

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        """End like a killed supervisor: the socket file stays, nobody listens."""
        assert self._server is not None
        self._server.close()
        writers = list(self._writers)
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    @property
    def clients(self) -> int:
        return len(self._writers)

    def push(self, **sections: Any) -> None:
        self.data = {**self.data, **sections}
        self._seq += 1
        for writer in self._writers:
            self._send(writer, {"type": "delta", "seq": self._seq, "data": sections})

    def answer_late(self) -> None:
        for writer in self._writers:
            for request in self.requests:
                self._send(writer, {"type": "response", "id": request["id"], **self.respond(request)})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._send(writer, self.hello)
        self._send(writer, {"type": "snapshot", "seq": 1, "data": self.data})
        try:
            while line := await reader.readline():
                request = json.loads(line)
                self.requests.append(request)
                if not self.mute:
                    self._send(writer, {"type": "response", "id": request["id"], **self.respond(request)})
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _send(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")


@contextlib.asynccontextmanager
async def serving(
    path: Path, data: dict[str, Any] | None = None, hello: dict[str, Any] | None = None
) -> AsyncIterator[FakeSupervisor]:
    fake = FakeSupervisor(path, data, hello)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()
