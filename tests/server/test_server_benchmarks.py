"""Measuring devices: what is told, when it is done, when it is not, and when it is out of date."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import AsyncClient, NoAccelerators, ShiftedClock, events, eventually, start_job, supervisor_running

from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable
from distensor_server.benchmarks import IDLE_SECONDS, boot_id
from distensor_server.devices.answers import Answer
from distensor_server.devices.benchmark import FEWEST_RUNS, disk_rates, rates
from distensor_server.devices.detect import Detector, installed_torch
from distensor_server.devices.host import Host, cpu_device
from distensor_server.devices.measured import NAMES, from_answer, from_json, to_json
from distensor_server.devices.model import Device
from distensor_server.statedir import StateDirectory, read_json, write_json

ANSWER = {
    "torch": "2.13.0",
    "matmul_f32": {"size": 1024, "p10": 1.23456789e11, "p50": 1.5e11, "runs": 9},
    "matmul_bf16": {"unavailable": "not for this type"},
    "memory": {"p10": 8e9, "p50": 9e9, "runs": 9},
    "disk_write": 5e8,
    "disk_read": {"unavailable": "/x: no space left"},
}


class Steps:
    """A timer that goes on by a given time at each question."""

    def __init__(self, *steps: float) -> None:
        self._steps = list(steps)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self._steps.pop(0) if self._steps else 0.25
        return self.now


def test_rates_are_the_slow_tenth_and_the_median() -> None:
    found = rates(lambda: None, 100.0, 3.0, Steps())
    assert found == {"p10": 400.0, "p50": 400.0, "runs": 6}
    uneven = rates(lambda: None, 100.0, 0.0, Steps(0, 0, 1, 0, 2, 0, 4, 0, 5, 0, 10))
    assert (uneven["p10"], uneven["p50"], uneven["runs"]) == (10.0, 25.0, FEWEST_RUNS)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=40))
def test_the_slow_tenth_is_never_faster_than_the_median(steps: list[float]) -> None:
    found = rates(lambda: None, 1.0, 1.0, Steps(*steps))
    assert 0 < found["p10"] <= found["p50"]


def test_the_disk_is_written_read_and_left_clean(tmp_path: Path) -> None:
    found = disk_rates(tmp_path, amount=1 << 20)
    assert found["disk_write"] > 0
    assert found["disk_read"] > 0
    assert list(tmp_path.iterdir()) == []
    lacking = disk_rates(tmp_path / "absent", amount=1 << 20)
    assert "No such file" in lacking["disk_read"]["unavailable"]


def test_an_answer_becomes_rates_with_reasons_and_survives_the_file() -> None:
    benchmark = from_answer(ANSWER, "key", 1234.5)
    assert benchmark.rates["matmul_f32_p10"] == 1.23456789e11
    assert benchmark.rates["matmul_bf16_p50"] == Unavailable(reason="not for this type")
    assert benchmark.rates["disk_read"] == Unavailable(reason="/x: no space left")
    stored = json.loads(json.dumps(to_json(benchmark)))
    again = from_json(stored)
    assert again is not None
    assert (again.key, again.at, set(again.rates)) == ("key", 1234.0, set(NAMES))
    assert again.rates["matmul_f32_p10"] == 1.235e11
    assert again.rates["disk_read"] == benchmark.rates["disk_read"]


@pytest.mark.parametrize(
    "torn", [None, [], {}, {"key": "k", "at": "x", "rates": {}}, {"key": "k", "at": 1, "rates": {}}]
)
def test_a_torn_file_is_measured_again(torn: Any) -> None:
    assert from_json(torn) is None


def test_a_child_that_failed_is_no_rate_at_all() -> None:
    benchmark = from_answer(Unavailable(reason="no answer within 90 s"), "key", 0.0)
    assert set(benchmark.rates.values()) == {Unavailable(reason="no answer within 90 s")}
    odd = from_answer({"memory": {"p10": float("nan"), "p50": -1}}, "key", 0.0)
    assert all(isinstance(rate, Unavailable) for rate in odd.rates.values())


class Measuring(NoAccelerators):
    """Answers benchmarks at once, or when the test says so."""

    def __init__(self, answer: Answer, ready: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        object.__setattr__(self, "_answer", answer)
        object.__setattr__(self, "_ready", ready)
        object.__setattr__(self, "asked", [])

    async def measure(self, device: Device, folder: Path, pids: set[int]) -> Answer:
        asked: list[DeviceId] = self.asked  # type: ignore[attr-defined]
        asked.append(device.device_id)
        pids.add(4711)
        try:
            if not self._ready():  # type: ignore[attr-defined]
                await asyncio.get_running_loop().create_future()
        finally:
            pids.discard(4711)
        found: Answer = self._answer  # type: ignore[attr-defined]
        return found


def quiet_host() -> Host:
    class Quiet(Host):
        def sample(self) -> Any:
            return replace(super().sample(), utilization=0.01)

    return Quiet()


def cpu_of(running: Any) -> Any:
    return running.supervisor.node.inventory.find(DeviceId("cpu"))


@pytest.mark.asyncio
async def test_an_idle_node_measures_itself_once_and_remembers(short_dir: Path) -> None:
    clock, detector = ShiftedClock(), Measuring(ANSWER)
    async with supervisor_running(short_dir, clock=clock, detector=detector, host=quiet_host()) as running:
        await running.connected()
        running.supervisor.tick()
        await asyncio.sleep(0)
        assert detector.asked == [], "not at the start"  # type: ignore[attr-defined]
        clock.monotonic_by += IDLE_SECONDS
        running.supervisor.tick()
        benchmark = await eventually(lambda: cpu_of(running).benchmark, "it is measured")
        assert (benchmark.stale, benchmark.rates["memory_p50"]) == (False, 9e9)
        running.supervisor.tick()
        assert detector.asked == ["cpu"]  # type: ignore[attr-defined]
        row = running.supervisor.node.sections()["devices"][-1]
        assert row["benchmark"]["memory_p50"] == 9e9
        assert row["benchmark"]["disk_read"] == {"unavailable": "/x: no space left"}
        assert running.supervisor.node.describe().devices[-1].matmul_flops == 1.23456789e11
    async with supervisor_running(short_dir, clock=clock, detector=detector, host=quiet_host()) as running:
        running.supervisor.tick()
        assert cpu_of(running).benchmark.rates["memory_p50"] == 9e9
        assert not cpu_of(running).benchmark.stale


@pytest.mark.asyncio
async def test_another_driver_or_boot_makes_it_stale_and_it_is_measured_again(short_dir: Path) -> None:
    clock, detector = ShiftedClock(), Measuring(ANSWER)
    async with supervisor_running(short_dir, clock=clock, detector=detector, host=quiet_host()) as running:
        clock.monotonic_by += IDLE_SECONDS
        await running.connected()
        running.supervisor.tick()
        clock.monotonic_by += IDLE_SECONDS
        running.supervisor.tick()
        await eventually(lambda: cpu_of(running).benchmark, "it is measured")
    stored = StateDirectory(short_dir / "state").root / "benchmarks.json"
    write_json(stored, json.loads(json.dumps(read_json(stored)).replace(boot_id(), "another-boot")))
    async with supervisor_running(short_dir, clock=clock, detector=detector, host=quiet_host()) as running:
        running.supervisor.tick()
        assert cpu_of(running).benchmark.stale
        clock.monotonic_by += IDLE_SECONDS
        running.supervisor.tick()
        await eventually(lambda: not cpu_of(running).benchmark.stale, "it is measured again")


@pytest.mark.asyncio
async def test_nothing_is_measured_beside_a_worker_nor_in_a_pause(short_dir: Path) -> None:
    clock, detector = ShiftedClock(), Measuring(ANSWER, ready=lambda: False)
    async with supervisor_running(short_dir, clock=clock, detector=detector, host=quiet_host()) as running:
        await running.connected()
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("benchmark", device="tpu"))["error"]["fix"] == "usable devices: cpu"
        assert (await client.request("benchmark", device="cpu"))["result"] == {"devices": ["cpu"]}
        running.supervisor.tick()
        await eventually(lambda: running.supervisor.node.inventory.helper_pids == {4711}, "it runs")
        assert 4711 in running.supervisor.node.picture().own_pids, "not foreign use of the device"
        await start_job(running, 0)
        running.supervisor.tick()
        await eventually(lambda: not running.supervisor.node.inventory.helper_pids, "it gave way to the worker")
        assert (await client.request("benchmark"))["error"]["code"] == "busy"
        assert cpu_of(running).benchmark is None
        await client.close()


@pytest.mark.asyncio
async def test_the_owner_may_ask_and_a_failure_is_told_once(short_dir: Path) -> None:
    detector = Measuring(Unavailable(reason="no answer within 90 s"))
    async with supervisor_running(short_dir, detector=detector) as running:
        await running.connected()
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause")
        running.supervisor.tick()
        assert (await client.request("benchmark"))["result"] == {"devices": ["cpu"]}
        running.supervisor.tick()
        await eventually(lambda: cpu_of(running).benchmark, "it was tried")
        assert "the benchmark failed: no answer within 90 s" in events(running)
        running.supervisor.tick()
        assert detector.asked == ["cpu"]  # type: ignore[attr-defined]
        await client.close()


@pytest.mark.asyncio
async def test_the_real_child_measures_this_cpu(tmp_path: Path) -> None:
    pids: set[int] = set()
    device = cpu_device(Host().sample(), slots=1, name="CPU")
    answer = await Detector().measure(device, tmp_path, pids)
    benchmark = from_answer(answer, "key", 0.0)
    assert not isinstance(answer, Unavailable)
    assert answer["torch"] == installed_torch()
    for name in NAMES:
        assert isinstance(benchmark.rates[name], float), benchmark.rates[name]
    assert benchmark.rates["matmul_f32_p50"] > 1e8
    assert pids == set()
    assert not (tmp_path / "benchmark.tmp").exists()
