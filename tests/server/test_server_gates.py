"""The evaluation of the gates: each one by table, all of them by their laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gate_kit import BERLIN, FINE, FINE_GPU, GIB, GPU, NO_LIMITS, START, Machine, at, moment, policy, with_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.reading import Unavailable
from distensor_server.gates.evaluate import evaluate
from distensor_server.gates.model import BEING_READ, DeviceReadings, Duty, Memory, Readings
from distensor_server.policy.policy import Policy
from distensor_server.policy.table import GATES
from distensor_server.surroundings.power import PowerSource

BLIND = Unavailable(reason="no sensor")
WORKING = {"busy": True}


def machine(**limits: Any) -> Machine:
    return Machine(policy(**limits))


# One gate after the other

CASES: list[tuple[str, dict[str, Any], Readings, str]] = [
    ("idle", {"only_when_idle": True}, replace(FINE, idle_seconds=10.0), "in use"),
    ("idle", {"only_when_idle": True}, replace(FINE, idle_seconds=240.0), "idle for 4 min"),
    ("battery", {"run_on_battery": False}, replace(FINE, power=PowerSource(on_battery=True, percent=80)), "80 %"),
    ("battery", {"battery_min_percent": 50}, replace(FINE, power=PowerSource(on_battery=True, percent=49)), "49 %"),
    ("metered", {"run_on_metered": False}, replace(FINE, metered=True), "a metered network"),
    ("ram", {"ram_reserve_gib": 4}, replace(FINE, ram_free=3 * GIB), "3.0 GiB free"),
    ("disk", {"disk_reserve_gib": 10}, replace(FINE, disk_free=9 * GIB), "9.0 GiB free"),
    ("bytes_day", {"bytes_day_gb": 2}, replace(FINE, day_bytes=2_000_000_000), "2.00 GB today"),
    ("bytes_month", {"bytes_month_gb": 2}, replace(FINE, month_bytes=2_000_000_000), "2.00 GB this month"),
    ("foreign_gpu", {"yield_gpu": True}, with_gpu(foreign_bytes=3 * GIB), "other programs hold 3072 MiB"),
    ("temperature", {"temperature_max_c": 70}, with_gpu(temperature_c=71.0), "71 C"),
    ("power", {"power_max_w": 200}, with_gpu(power_w=201.0), "201 W"),
    ("vram", {"vram_reserve_gib": 4}, with_gpu(memory_free=3 * GIB), "3.0 GiB free"),
    ("schedule", {"devices": {GPU: {"schedule": "mon 10:00-11:00"}}}, FINE, "outside the windows"),
]


@pytest.mark.parametrize(("name", "limits", "readings", "words"), CASES)
def test_a_gate_closes_over_its_limit_and_opens_after_the_dwell(
    name: str, limits: dict[str, Any], readings: Readings, words: str
) -> None:
    node = machine(**limits)
    node.look(readings)
    closed = [gate for gate in node.verdicts.gates if not gate.open]
    assert [(gate.gate, gate.state) for gate in closed] == [(name, "closed")]
    assert words in closed[0].reading
    assert closed[0].limit
    assert closed[0].since == START + 2
    if name == "schedule" or name.startswith("bytes"):
        return
    node.look(FINE)
    assert not node.gate(name, closed[0].device).open
    assert node.gate(name, closed[0].device).next_change_at == START + 4 + 60
    node.look(FINE, 59.0)
    assert not node.gate(name, closed[0].device).open
    node.look(FINE, 1.0)
    assert node.gate(name, closed[0].device).open


@pytest.mark.parametrize(("name", "limits", "readings", "words"), CASES)
def test_the_same_reading_without_a_limit_closes_nothing(
    name: str, limits: dict[str, Any], readings: Readings, words: str
) -> None:
    verdicts = Machine(NO_LIMITS).look(readings)
    assert all(gate.open and gate.state == "open" for gate in verdicts.gates)
    assert verdicts.blocked is None


def test_a_schedule_opens_and_closes_to_the_minute_without_a_dwell() -> None:
    node = Machine(policy(schedule="18:00-08:00"), start=at("2026-12-01T17:59", BERLIN), zone=BERLIN)
    node.look(FINE, 0.0)
    assert not node.gate("schedule").open
    assert node.gate("schedule").next_change_at == at("2026-12-01T18:00", BERLIN)
    node.look(FINE, 60.0)
    assert node.gate("schedule").open
    assert node.gate("schedule").next_change_at == at("2026-12-02T08:00", BERLIN)
    node.look(FINE, 14 * 3600.0)
    assert not node.gate("schedule").open


def test_a_device_has_its_own_windows_and_others_go_on() -> None:
    node = Machine(policy(devices={GPU: {"schedule": "22:00-06:00"}}), start=at("2026-12-01T12:00"))
    other = replace(FINE_GPU, device_id="GPU-8")
    node.look(replace(FINE, devices=(FINE_GPU, other)))
    assert node.verdicts.closed(GPU) is not None
    assert node.verdicts.closed("GPU-8") is None
    assert node.verdicts.blocked is None
    node.look(FINE)
    assert node.verdicts.blocked == node.verdicts.closed(GPU)


def test_a_game_on_one_gpu_gates_that_gpu_only() -> None:
    node = machine(yield_gpu=True)
    played = replace(FINE_GPU, foreign_bytes=6 * GIB)
    node.look(replace(FINE, devices=(played, replace(FINE_GPU, device_id="GPU-8"))))
    assert [(gate.gate, gate.device) for gate in node.verdicts.gates if not gate.open] == [("foreign_gpu", GPU)]
    assert node.verdicts.blocked is None


def test_a_desktop_on_the_gpu_is_no_game() -> None:
    node = machine(yield_gpu=True)
    node.look(with_gpu(foreign_bytes=900 << 20))
    assert node.gate("foreign_gpu", GPU).open


def test_between_the_thresholds_nothing_changes() -> None:
    node = machine(ram_reserve_gib=4, battery_min_percent=50)
    between = replace(FINE, ram_free=int(4.2 * GIB), power=PowerSource(on_battery=True, percent=52))
    node.look(between)
    assert node.verdicts.blocked is None
    node.look(replace(FINE, ram_free=3 * GIB, power=PowerSource(on_battery=True, percent=40)))
    node.look(between)
    node.look(between, 600)
    assert not node.gate("ram").open
    assert not node.gate("battery").open


def test_memory_that_our_workers_gave_back_is_no_room_for_half_an_hour() -> None:
    node = machine(ram_reserve_gib=4)
    node.look(replace(FINE, ram_free=3 * GIB, ram_own=6 * GIB))
    after = replace(FINE, ram_free=9 * GIB)
    node.look(after)
    node.look(after, 600)
    assert not node.gate("ram").open, "the next worker would fill it again"
    node.look(after, 1300)
    node.look(after, 60)
    assert node.gate("ram").open


READ = [case[:2] for case in CASES if case[0] != "schedule" and not case[0].startswith("bytes")]
"""The clock and our own counters can always be read."""


@pytest.mark.parametrize(("name", "limits"), READ)
def test_a_reading_that_cannot_be_had_says_so_and_closes_only_what_is_strict(name: str, limits: dict[str, Any]) -> None:
    blind_gpu = replace(FINE_GPU, temperature_c=BLIND, power_w=BLIND, memory_free=BLIND, foreign_bytes=BLIND)
    blind = Readings(
        idle_seconds=BLIND, power=BLIND, metered=BLIND, ram_free=BLIND, disk_free=BLIND, devices=(blind_gpu,)
    )
    for strict in (False, True):
        node = machine(**limits, strict=[name] if strict else [])
        node.look(blind)
        gate = next(gate for gate in node.verdicts.gates if gate.gate == name and gate.limit)
        assert (gate.open, gate.state) == ((False, "closed") if strict else (True, "unknown"))
        assert gate.reading == "cannot be read: no sensor"


def test_a_gate_that_was_just_set_waits_for_its_first_reading() -> None:
    node = machine(only_when_idle=True)
    node.look(replace(FINE, idle_seconds=BEING_READ))
    assert not node.gate("idle").open
    assert node.gate("idle").reading == "being read"
    node.look(replace(FINE, idle_seconds=BLIND))
    assert node.gate("idle").state == "unknown"


def test_nobody_logged_in_is_idle() -> None:
    node = machine(only_when_idle=True)
    node.look(replace(FINE, idle_seconds=float("inf")))
    assert (node.gate("idle").open, node.gate("idle").reading) == (True, "nobody is logged in")


def test_a_byte_cap_closes_before_it_is_passed_and_opens_with_the_new_day() -> None:
    node = Machine(policy(bytes_day_gb=10), start=at("2026-12-31T23:50", BERLIN), zone=BERLIN)
    node.look(replace(FINE, day_bytes=9_500_000_000, sent_rate=30e6, received_rate=30e6), 0.0)
    assert not node.gate("bytes_day").open, "720 MB more would flow until workers have left"
    assert node.gate("bytes_day").next_change_at == at("2027-01-01T00:00", BERLIN)
    node.look(replace(FINE, day_bytes=9_700_000_000))
    assert not node.gate("bytes_day").open
    node.look(replace(FINE, day_bytes=0), 600.0)
    assert node.gate("bytes_day").open


def test_the_limit_of_one_device_wins_over_that_of_all() -> None:
    node = machine(temperature_max_c=60, devices={GPU: {"temperature_max_c": 90}})
    node.look(with_gpu(temperature_c=80.0))
    assert node.gate("temperature", GPU).limit == "90 C"
    assert node.gate("temperature", GPU).open


def test_taking_a_limit_away_opens_its_gate_at_once() -> None:
    node = machine(ram_reserve_gib=4)
    node.look(replace(FINE, ram_free=GIB))
    node.limits = NO_LIMITS
    node.look(replace(FINE, ram_free=GIB))
    assert node.gate("ram").open


def test_a_clock_that_is_set_moves_since_when() -> None:
    node = machine(ram_reserve_gib=4)
    node.look(replace(FINE, ram_free=GIB))
    node.memory = node.memory.moved(3600)
    node.look(replace(FINE, ram_free=GIB))
    assert node.gate("ram").since == START + 2 + 3600


# Slowing down before stopping


def test_a_hot_device_is_slowed_first_and_stopped_only_when_that_does_not_help() -> None:
    node = machine(temperature_max_c=80)
    factors = []
    for _ in range(120):
        node.look(with_gpu(temperature_c=82.0, **WORKING))
        factors.append(node.verdicts.duties[GPU])
        if not node.gate("temperature", GPU).open:
            break
    assert factors[0] == 0.85
    assert factors == sorted(factors, reverse=True)
    assert min(factors) == 0.25
    assert not node.gate("temperature", GPU).open
    assert len(factors) * 2 >= 60, "the dwell at the floor comes first"


def test_slowing_down_that_helps_closes_nothing_and_is_taken_back_in_small_steps() -> None:
    node = machine(temperature_max_c=80)
    for _ in range(8):
        node.look(with_gpu(temperature_c=81.0, **WORKING), 10.0)
    slowest = node.verdicts.duties[GPU]
    for _ in range(40):
        node.look(with_gpu(temperature_c=74.0, **WORKING), 10.0)
        assert node.gate("temperature", GPU).open
    assert slowest < 0.5
    assert node.verdicts.duties[GPU] == 1.0


def test_heat_that_is_not_ours_closes_at_once() -> None:
    node = machine(temperature_max_c=80)
    node.look(with_gpu(temperature_c=82.0))
    assert not node.gate("temperature", GPU).open


def test_without_slowing_the_gate_closes_at_once() -> None:
    node = machine(power_max_w=200, duty_min_percent=100)
    node.look(with_gpu(power_w=250.0, **WORKING))
    assert node.verdicts.duties[GPU] == 1.0
    assert not node.gate("power", GPU).open


def test_a_floor_that_is_raised_holds_at_once() -> None:
    node = machine(temperature_max_c=80)
    node.memory = Memory(duties={GPU: Duty(factor=0.25, changed=101.0)})
    node.limits = policy(temperature_max_c=80, duty_min_percent=60)
    node.look(with_gpu(temperature_c=82.0, **WORKING))
    assert node.verdicts.duties[GPU] == 0.6


# Laws

TEMPERATURE = st.floats(20, 120) | st.just(BLIND)
BYTES = st.integers(0, 32 * GIB) | st.just(BLIND)
GPUS = st.builds(
    DeviceReadings,
    device_id=st.just(GPU),
    accelerator=st.just(True),
    busy=st.booleans(),
    temperature_c=TEMPERATURE,
    power_w=TEMPERATURE,
    memory_free=BYTES,
    memory_own=st.integers(0, 8 * GIB),
    foreign_bytes=BYTES,
)
READINGS = st.builds(
    Readings,
    idle_seconds=st.floats(0, 1e5) | st.just(BLIND),
    power=st.builds(PowerSource, on_battery=st.booleans(), percent=st.none() | st.floats(0, 100)) | st.just(BLIND),
    metered=st.booleans() | st.just(BLIND),
    ram_free=BYTES,
    ram_own=st.integers(0, 8 * GIB),
    disk_free=BYTES,
    day_bytes=st.integers(0, 10**11),
    month_bytes=st.integers(0, 10**12),
    sent_rate=st.floats(0, 1e8),
    devices=st.tuples(GPUS),
)
STRICTEST = policy(
    only_when_idle=True,
    run_on_battery=False,
    run_on_metered=False,
    yield_gpu=True,
    temperature_max_c=70,
    power_max_w=70,
    vram_reserve_gib=8,
    ram_reserve_gib=8,
    disk_reserve_gib=8,
    dwell_seconds=30,
    strict=list(GATES),
)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(READINGS, st.floats(0.5, 40)), min_size=2, max_size=40))
def test_no_gate_flaps_faster_than_the_dwell(steps: list[tuple[Readings, float]]) -> None:
    node = Machine(STRICTEST)
    closed_at: dict[tuple[str, str | None], float] = {}
    was_open: dict[tuple[str, str | None], bool] = {}
    for readings, after in steps:
        for gate in node.look(readings, after).gates:
            ref = (gate.gate, gate.device)
            if was_open.get(ref, True) and not gate.open:
                assert node.seconds - closed_at.get(ref, float("-inf")) >= 30
                closed_at[ref] = node.seconds
            if not was_open.get(ref, True) and gate.open:
                assert node.seconds - closed_at[ref] >= 30
            was_open[ref] = gate.open


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(READINGS, min_size=1, max_size=8))
def test_without_limits_nothing_ever_closes_or_slows(steps: list[Readings]) -> None:
    node = Machine(NO_LIMITS)
    for readings in steps:
        verdicts = node.look(readings)
        assert all(gate.open for gate in verdicts.gates)
        assert verdicts.duties == {GPU: 1.0}


def _memories(limits: Policy, past: list[Readings]) -> Memory:
    node = Machine(limits)
    for readings in past:
        node.look(readings, 10.0)
    return node.memory


@settings(max_examples=40, deadline=None)
@given(past=st.lists(READINGS, max_size=6), now=READINGS, worse=st.floats(0, 50))
def test_hotter_fuller_or_busier_never_opens_or_speeds_up(past: list[Readings], now: Readings, worse: float) -> None:
    memory = _memories(STRICTEST, past)
    gpu = now.devices[0]
    by = int(worse * GIB)
    worse_gpu = replace(
        gpu,
        temperature_c=gpu.temperature_c if isinstance(gpu.temperature_c, Unavailable) else gpu.temperature_c + worse,
        power_w=gpu.power_w if isinstance(gpu.power_w, Unavailable) else gpu.power_w + worse,
        memory_free=gpu.memory_free if isinstance(gpu.memory_free, Unavailable) else max(0, gpu.memory_free - by),
        foreign_bytes=gpu.foreign_bytes if isinstance(gpu.foreign_bytes, Unavailable) else gpu.foreign_bytes + by,
    )
    idle = now.idle_seconds
    worse_now = replace(
        now,
        devices=(worse_gpu,),
        idle_seconds=idle if isinstance(idle, Unavailable) else idle / (1 + worse),
        ram_free=now.ram_free if isinstance(now.ram_free, Unavailable) else max(0, now.ram_free - by),
        day_bytes=now.day_bytes + by,
    )
    good, _ = evaluate(now, STRICTEST, memory, moment(1000.0))
    bad, _ = evaluate(worse_now, STRICTEST, memory, moment(1000.0))
    assert bad.duties[GPU] <= good.duties[GPU]
    for better, other in zip(good.gates, bad.gates, strict=True):
        assert better.open or not other.open, other


@settings(max_examples=30, deadline=None)
@given(
    temperatures=st.lists(TEMPERATURE, min_size=1, max_size=40), floor=st.integers(25, 100), after=st.floats(0.1, 60)
)
def test_the_duty_stays_in_its_bounds(temperatures: list[Any], floor: int, after: float) -> None:
    node = machine(temperature_max_c=70, duty_min_percent=floor)
    for temperature in temperatures:
        node.look(with_gpu(temperature_c=temperature, busy=True), after)
        assert floor / 100 <= node.verdicts.duties[GPU] <= 1.0
