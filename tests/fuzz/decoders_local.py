"""Decoders on one machine: lines of workers and of local clients, files of the supervisor, and the dashboard's view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decoders_control import TOKEN
from decoders_data import of_json

from distensor.core.errors import DistensorError
from distensor.testing.fuzzing import Decoder
from distensor_server import breakers, localserver, receipts, updates
from distensor_server.config import read_settings_file
from distensor_server.devices import measured
from distensor_server.devices.detect import read_answer
from distensor_server.gates.traffic import Traffic
from distensor_server.holds import load_hold, parse_drain, parse_pause
from distensor_server.keys.files import read_text
from distensor_server.keys.login import read_key
from distensor_server.localserver import RequestError
from distensor_server.messages import parse_worker_line
from distensor_server.ownersfile import read_owners_file
from distensor_server.policy.table import KEYS
from distensor_server.policy.windows import parse_windows
from distensor_server.receipts import load_totals
from distensor_server.service.launchd import parse_print
from distensor_server.statedir import read_json
from distensor_tui import lastseen, recording, wire
from distensor_tui.cli import DEMO
from distensor_tui.income import read_income
from distensor_tui.model import Snapshot
from distensor_tui.sections import apply
from distensor_tui.settings import read_limits

NOW = 1.7e9
REFUSALS: tuple[type[Exception], ...] = (DistensorError, RequestError)
WORKER_LINES = (
    {"type": "ready", "v": 1, "port": 40_000, "csr": "request"},
    {"type": "connected"},
    {
        "type": "progress", "state": "training", "step": 3, "total_steps": 9, "stages": [0], "loss": 2.5,
        "tokens_per_second": 100.0, "compute_s": 1.0, "sync_s": 0.5, "wait_s": 0.1, "rss": 1 << 28,
        "links": [{"peer": 1, "sent": 10, "received": 20, "rtt_ms": 0.5, "rtt_age_s": 1.0, "path": "lan"}],
    },
    {"type": "claim", "step": 3, "micro_batches": 2},
    {"type": "event", "severity": "warning", "text": "slow"},
    {"type": "failed", "code": "error", "message": "out of luck"},
)  # fmt: skip
REQUEST = {"type": "request", "id": "1", "method": "pause", "params": {"seconds": 3600}}


def encoded(*values: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def plain(name: str, decode: Callable[[bytes], object], *seeds: bytes, **more: Any) -> Decoder:
    return Decoder(name=name, decode=decode, seeds=seeds, refuses=REFUSALS, **more)


def in_file(name: str, path: Path, read: Callable[[Path], object], *seeds: bytes) -> Decoder:
    def run(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return plain(name, run, *seeds, cost=4)


def lines() -> list[Decoder]:
    """What others say to the supervisor while it runs."""
    index = {"v": 1, "version": "0.2.0", "sha256": "ab" * 32}
    return [
        plain("distensor_server.messages:parse_worker_line", parse_worker_line, *encoded(*WORKER_LINES)),
        plain("distensor_server.localserver:_parse_request", localserver._parse_request, *encoded(REQUEST)),
        _pause(),
        _drain(),
        Decoder(
            name="distensor_server.updates:parse_index",
            decode=updates.parse_index,
            seeds=encoded(index),
            refuses=(ValueError, RecursionError),  # as it says; its only caller takes both
        ),
        of_json("distensor_server.updates:_parse_checked", updates._parse_checked, {"at": 1, "release": index}),
        plain(
            "distensor_server.devices.detect:read_answer",
            lambda data: read_answer(data, data, 0),
            b'noise\n{"devices": [{"uuid": "GPU-1", "memory": 1}]}',
        ),
        plain(
            "distensor_server.service.launchd:parse_print",
            lambda data: parse_print(data.decode("utf-8", "replace")),
            b"gui/501/x = {\n\tstate = running\n\tpid = 12\n\tprogram = /a\n}\n",
        ),
        plain(
            "distensor_server.keys.login:read_key", lambda data: read_key(data.decode("utf-8", "replace")),
            TOKEN.encode().encode(),
        ),
        plain("distensor_server.keys.files:read_text", lambda data: read_text(Path("key"), data), b"dtj_abc\n"),
        plain(
            "distensor_server.policy.windows:parse_windows", _windows,
            b"mon-fri 18:00-08:00; sat,sun", b"09:00-17:30",
        ),
        plain(
            "distensor_server.policy.table:Key.parse", _settings, b"mon-fri 18:00-08:00", b"12", b"0.5", b"a, b", b"on",
        ),
    ]  # fmt: skip


def _pause() -> Decoder:
    pause = of_json(
        "distensor_server.holds:parse_pause", lambda value: parse_pause(value, NOW), {"seconds": 60}, {"until": NOW + 9}
    )
    return plain(pause.name, pause.decode, *pause.seeds)


def _drain() -> Decoder:
    drain = of_json("distensor_server.holds:parse_drain", lambda value: parse_drain(value, 90.0), {"seconds": 60})
    return plain(drain.name, drain.decode, *drain.seeds)


def _windows(data: bytes) -> object:
    return parse_windows(data.decode("utf-8", "replace"))


def _settings(data: bytes) -> None:
    """One text for every setting there is: it may be wrong for all of them."""
    text = data.decode("utf-8", "replace")
    for key in KEYS:
        try:
            key.parse(text)
        except DistensorError:
            continue


def files(folder: Path) -> list[Decoder]:
    """What the supervisor reads again after a restart; a torn file must not keep it from starting."""
    path = folder / "state"
    unit = {"at": NOW, "job": "j_1", "epoch": 1, "step": 3, "rank": 0, "micro_batches": 2}
    totals = {
        "v": 1, "day": "2026-12-01", "baseline_micro": 1, "last_micro": 5, "claimed_units": 2,
        "earlier": [{"day": "2026-11-30", "baseline_micro": 0, "claimed_units": 1}],
    }  # fmt: skip
    broken = {"job": "j_1", "epoch": 1, "rank": 0, "failures": 2, "restarts": 1, "reason": "x", "at": NOW}
    rates = measured.from_answer({"matmul_f32": {"p10": 1e9, "p50": 2e9}}, "key", NOW)
    server = "distensor_server"
    toml = b'drain_seconds = 60\nschedule = "mon-fri 18:00-08:00"\n[devices.cpu]\nvram_reserve_gib = 1\n'
    return [
        in_file(f"{server}.statedir:read_json", path, read_json, *encoded(totals)),
        in_file(f"{server}.receipts:load_totals", path, load_totals, *encoded(totals)),
        plain(f"{server}.receipts:_parse", lambda data: receipts._parse(data, 0.0), *encoded(unit)),
        in_file(
            f"{server}.holds:load_hold", path, lambda each: load_hold(each, NOW),
            *encoded({"v": 1, "kind": "pause", "until": NOW + 60, "lasts": True}),
        ),
        of_json(f"{server}.breakers:_parse", lambda value: breakers._parse(value, NOW), {"v": 1, "workers": [broken]}),
        of_json(f"{server}.devices.measured:from_json", measured.from_json, measured.to_json(rates)),
        of_json(
            f"{server}.devices.measured:from_answer", lambda value: measured.from_answer(value, "key", NOW),
            {"matmul_f32": {"p10": 1e9, "p50": 2e9}, "memory": 1e10, "disk_read": {"reason": "no room"}},
        ),
        in_file(
            f"{server}.gates.traffic:Traffic.load", path, lambda each: Traffic(each).load("2026-12-01"),
            *encoded({"date": "2026-12-01", "day_bytes": 5, "month_bytes": 9}),
        ),
        in_file(f"{server}.config:read_settings_file", path, read_settings_file, toml),
        in_file(f"{server}.ownersfile:read_owners_file", path, read_owners_file, toml),
    ]  # fmt: skip


def dashboard(folder: Path) -> list[Decoder]:
    moments = [json.loads(row) for row in DEMO.read_text().splitlines()[:40] if '"message"' in row]
    said = [moment["message"] for moment in moments]
    full = next(message["data"] for message in said if message["type"] == "snapshot")
    kinds = {message["type"]: message for message in reversed(said)}
    tape = "\n".join(json.dumps(moment) for moment in moments[:6]).encode()
    tui = "distensor_tui"
    refuses: tuple[type[Exception], ...] = (wire.WireError, recording.RecordingError)

    def shown(name: str, read: Callable[[Any], object], *seeds: Any, cost: int = 4) -> Decoder:
        found = of_json(f"{tui}.{name}", read, *seeds)
        return Decoder(name=found.name, decode=found.decode, seeds=found.seeds, refuses=refuses, cost=cost)

    seen = {"schema_version": wire.SCHEMA_VERSION, "at": NOW, "data": full}
    return [
        Decoder(name=f"{tui}.wire:decode", decode=wire.decode, seeds=encoded(*kinds.values()), refuses=refuses, cost=4),
        shown("sections:apply", lambda value: apply(Snapshot(), value, full=True), full, cost=20),
        shown("income:read_income", lambda value: read_income(value, []), full.get("income", {"hours": [1, 2]})),
        shown("settings:read_limits", lambda value: read_limits(value, []), full.get("limits", {"rows": []})),
        _with(refuses, f"{tui}.lastseen:load", folder / "seen", lambda each: lastseen.load((each,)), *encoded(seen)),
        _with(refuses, f"{tui}.recording:load", folder / "tape", recording.load, tape),
    ]  # fmt: skip


def _with(
    refuses: tuple[type[Exception], ...], name: str, path: Path, read: Callable[[Path], object], seed: bytes
) -> Decoder:
    found = in_file(name, path, read, seed)
    return Decoder(name=name, decode=found.decode, seeds=found.seeds, refuses=refuses, cost=20)


def decoders(folder: Path) -> list[Decoder]:
    """`folder`: an empty one of its own."""
    return [*lines(), *files(folder), *dashboard(folder)]
