"""What closed gates do to a running supervisor: workers end, nothing is offered, and all of it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_fakes import (
    GIB,
    QUIET,
    AsyncClient,
    OneGpu,
    ShiftedClock,
    assignment,
    events,
    eventually,
    own_worker,
    start_job,
    state_of,
    supervisor_running,
)

from distensor.core.control import DeviceInfo, WorkerState
from distensor.core.reading import Reading
from distensor_server.gates.traffic import Traffic
from distensor_server.surroundings.power import PowerSource

pytestmark = pytest.mark.asyncio
FAR = "fri 03:00-03:01"


def config(directory: Path, text: str) -> Path:
    file = directory / "server.toml"
    file.write_text(f"dwell_seconds = 5\n{text}\n")
    return file


def gate(sections: dict[str, Any], name: str, device: str | None = None) -> dict[str, Any]:
    return next(row for row in sections["node"]["why"] if (row["gate"], row["device"]) == (name, device))


class Battery:
    """A plug that a test pulls."""

    def __init__(self) -> None:
        self.on_battery = False

    def read(self, _platform: str) -> Reading[PowerSource]:
        return PowerSource(on_battery=self.on_battery, percent=63.0)


async def test_a_node_on_battery_ends_its_work_and_goes_on_when_plugged_in(short_dir: Path) -> None:
    plug, clock = Battery(), ShiftedClock()
    surroundings = replace(QUIET, read_power=plug.read)
    file = config(short_dir, "run_on_battery = false")
    async with supervisor_running(short_dir, config_file=file, surroundings=surroundings, clock=clock) as running:
        await start_job(running, 0)
        assert state_of(running) == "EARNING"
        plug.on_battery = True
        running.supervisor.tick()
        assert not running.link.accepting
        assert state_of(running) in ("DRAINING", "WAITING")
        await running.reported(WorkerState.EXITED)
        assert running.link.changes()[-1].reason == "the gate battery is closed: on battery, 63 %"
        assert state_of(running) == "WAITING"
        shown = gate(running.sections(), "battery")
        assert (shown["state"], shown["limit"]) == ("closed", "on mains")
        running.assign(1)
        assert running.link.changes(1)[0].reason == "refused: the gate battery is closed: on battery, 63 %"
        assert "gate battery closed: on battery, 63 % (limit: on mains)" in events(running)
        plug.on_battery = False
        running.supervisor.tick()
        assert gate(running.sections(), "battery")["next_change_at"] is not None
        assert not running.link.accepting
        clock.monotonic_by += 5
        running.supervisor.tick()
        assert running.link.accepting
        assert state_of(running) == "IDLE"


async def test_a_pause_is_told_before_a_gate(short_dir: Path) -> None:
    file = config(short_dir, f'schedule = "{FAR}"')
    async with supervisor_running(short_dir, config_file=file) as running:
        assert state_of(running) == "WAITING"
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause")
        assert state_of(running) == "PAUSED"
        await client.request("resume")
        assert state_of(running) == "WAITING"
        assert not running.link.accepting
        await client.close()


async def test_a_closed_schedule_is_closed_before_the_hub_can_ask(short_dir: Path) -> None:
    file = config(short_dir, f'schedule = "{FAR}"')
    async with supervisor_running(short_dir, connect=False, config_file=file) as running:
        await eventually(lambda: running.link.accepting is False, "told before the link is up")
        await running.connected()
        assert gate(running.sections(), "schedule")["next_change_at"] is not None


async def test_a_gated_device_offers_no_slot_and_the_others_do(short_dir: Path) -> None:
    file = config(short_dir, f'[devices."GPU-7"]\nschedule = "{FAR}"')
    async with supervisor_running(short_dir, config_file=file, detector=OneGpu()) as running:
        offered: dict[str, DeviceInfo] = {info.device_id: info for info in running.link.describe().devices}
        assert (offered["GPU-7"].slots, offered["cpu"].slots) == (0, 2)
        assert offered["GPU-7"].unusable == "the gate schedule of GPU-7 is closed: outside the windows"
        assert running.link.accepting
        assert state_of(running) == "IDLE"
        running.link.handler.on_assignment(assignment(0, device="GPU-7"))
        assert "the gate schedule of GPU-7 is closed" in running.link.changes()[0].reason
        await start_job(running, 1)


async def test_what_is_reserved_is_not_offered(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        before = running.link.describe().devices[-1]
    file = config(short_dir, "ram_reserve_gib = 0.25")
    async with supervisor_running(short_dir, config_file=file) as running:
        after = running.link.describe().devices[-1]
        assert isinstance(before.memory_bytes, int)
        assert isinstance(after.memory_bytes, int)
        assert before.memory_bytes - after.memory_bytes == GIB // 4


async def test_a_limit_that_nothing_can_read_is_told_before_the_change(short_dir: Path) -> None:
    """A temperature limit on a card that tells none must not look as if it held."""
    hot = {"key": "temperature_max_c", "device": "GPU-7", "value": 80, "check": True}
    async with supervisor_running(short_dir, detector=OneGpu()):
        client = await AsyncClient.connect(short_dir / "s.sock")
        asked = (await client.request("limits_set", **hot))["result"]
        assert [(row["gate"], row["device"]) for row in asked["unread"]] == [("temperature", "GPU-7")]
        assert "cannot be read" in asked["unread"][0]["reading"]
        assert asked["closes"] == []
        await client.request("limits_set", key="strict", value="temperature")
        strict = (await client.request("limits_set", **hot))["result"]
        assert [row["gate"] for row in strict["closes"]] == ["temperature"]
        assert strict["unread"] == []
        await client.close()


async def test_the_consequence_is_told_before_the_change(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        client = await AsyncClient.connect(short_dir / "s.sock")
        asked = await client.request("limits_set", key="schedule", value=FAR, check=True)
        assert [row["gate"] for row in asked["result"]["closes"]] == ["schedule"]
        assert asked["result"]["ends_workers"] == [own_worker(running)["id"]]
        assert not asked["result"]["changed"]
        assert state_of(running) == "EARNING"
        harmless = await client.request("limits_set", key="drain_seconds", value=5, check=True)
        assert (harmless["result"]["closes"], harmless["result"]["ends_workers"]) == ([], [])
        assert (await client.request("limits_set", key="schedule", value=FAR))["result"]["changed"]
        await running.reported(WorkerState.EXITED)
        await client.request("limits_unset", key="schedule")
        assert running.link.accepting
        await client.close()


async def test_idle_is_asked_for_only_when_it_matters(short_dir: Path) -> None:
    asked: list[str] = []

    async def ask(command: Sequence[str]) -> Reading[str]:
        asked.append(command[0])
        return ""  # logind has no session: nobody is there

    surroundings = replace(QUIET, ask=ask)
    async with supervisor_running(short_dir, surroundings=surroundings) as running:
        running.supervisor.tick()
        assert asked == []
    file = config(short_dir, "only_when_idle = true\nrun_on_metered = false")
    async with supervisor_running(short_dir, config_file=file, surroundings=surroundings) as running:
        await eventually(lambda: "busctl" in asked, "asked")
        running.supervisor.tick()
        rows = running.sections()
        assert gate(rows, "idle")["reading"].startswith("nobody is logged in")
        assert gate(rows, "metered")["state"] == "unknown"
        assert "gate metered stays open" in " ".join(events(running))


async def test_workers_are_told_their_share_of_the_traffic(short_dir: Path) -> None:
    told = short_dir / "pace"
    file = config(short_dir, "upload_max_mb_s = 4\ndownload_max_mb_s = 2")
    async with supervisor_running(short_dir, "--pace-file", str(told), config_file=file) as running:
        await start_job(running, 0, 1)
        running.supervisor.tick()
        await eventually(lambda: told.exists() and len(told.read_text().splitlines()) >= 2, "told")
        assert '"send_rate":2000000.0,"receive_rate":1000000.0' in told.read_text()


async def test_traffic_is_counted_kept_and_closes_the_gate(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        await eventually(lambda: len(running.link.claims) == 3, "three steps are done")
        running.supervisor.tick()
        # The fake worker has sent 3000 bytes and received half of that.
        assert running.sections()["usage"]["bytes_day"] == 4500
    file = config(short_dir, "bytes_day_gb = 0.000004")
    async with supervisor_running(short_dir, config_file=file) as running:
        assert running.sections()["usage"]["bytes_month"] == 4500
        assert not gate(running.sections(), "bytes_day")["open"]
        assert state_of(running) == "WAITING"


async def test_a_new_day_and_a_new_month_begin_at_nothing(short_dir: Path) -> None:
    file = short_dir / "traffic.json"
    file.write_text('{"date": "2026-12-30", "day_bytes": 5, "month_bytes": 70}')
    for date, day, month in (("2026-12-30", 5, 70), ("2026-12-31", 0, 70), ("2027-01-01", 0, 0), ("2026-12-29", 5, 70)):
        traffic = Traffic(file)
        traffic.load(date)
        assert (traffic.day, traffic.month) == (day, month), date
    file.write_text("broken")
    traffic = Traffic(file)
    traffic.load("2026-12-30")
    assert (traffic.day, traffic.month) == (0, 0)
