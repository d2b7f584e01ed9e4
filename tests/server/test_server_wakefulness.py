"""A machine that slept, a process that was stopped, a clock that was set: told apart, and none of them a fault."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import (
    AsyncClient,
    ShiftedClock,
    events,
    eventually,
    own_worker,
    start_job,
    state_of,
    supervisor_running,
)

from distensor.comm import LinkError, LinkState
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import Earnings, WorkerState
from distensor.testing.clock import FakeClock
from distensor_server.durations import spoken
from distensor_server.lifecycle import RestartPolicy
from distensor_server.wakefulness import SET_SECONDS, SLEPT_SECONDS, Between, Moment, compare

HOUR = 3600.0


def test_each_is_told_apart() -> None:
    clock = FakeClock()
    moments = [Moment.of(clock)]
    for change in (
        lambda: clock.advance(2),
        lambda: clock.suspend(3 * HOUR),
        lambda: clock.advance(30),
        lambda: clock.jump_wall(-HOUR),
        lambda: clock.jump_wall(HOUR),
    ):
        change()
        moments.append(Moment.of(clock))
    seen = [compare(before, after) for before, after in pairwise(moments)]
    assert seen == [
        Between(),
        Between(slept=3 * HOUR),
        Between(stopped=30),
        Between(clock_set=-HOUR),
        Between(clock_set=HOUR),
    ]


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(-1e6, 1e6))
def test_whatever_comes_together_is_taken_apart(ran: float, slept: float, jump: float) -> None:
    clock = FakeClock()
    before = Moment.of(clock)
    clock.advance(ran)
    clock.suspend(slept)
    clock.jump_wall(jump)
    between = compare(before, Moment.of(clock))
    assert abs(between.slept - slept) < 1e-3 if slept > SLEPT_SECONDS + 1e-3 else between.slept <= SLEPT_SECONDS + 1e-3
    assert abs(between.clock_set - jump) < 1e-2 if abs(jump) > SET_SECONDS + 1e-2 else abs(between.clock_set) < 6


def test_the_machine_has_the_three_clocks() -> None:
    first, second = Moment.of(SYSTEM_CLOCK), Moment.of(SYSTEM_CLOCK)
    assert compare(first, second) == Between()
    assert second.boot >= first.boot


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (720, "12 min"), (11040, "3 h 4 min"), (7200, "2 h"), (190800, "2 d 5 h"), (172800, "2 d")],
)
def test_durations_are_spoken(seconds: float, words: str) -> None:
    assert spoken(seconds) == words


@pytest.mark.asyncio
async def test_after_a_sleep_hub_and_devices_are_asked_at_once_and_nothing_counts_as_a_failure(
    short_dir: Path,
) -> None:
    clock = ShiftedClock()
    policy = RestartPolicy(first_delay=0.05, longest_delay=0.1, failures_to_break=2, stop_grace=0.5)
    async with supervisor_running(short_dir, clock=clock, policy=policy) as running:
        await start_job(running, 0)
        looked = running.supervisor.node.inventory.detected
        assert looked
        clock.slept += 3 * HOUR + 240
        running.supervisor.tick()
        assert "slept 3 h 4 min: looking for devices and hub again" in events(running)
        assert running.link.woken == 1
        for restarts in (1, 2, 3):
            os.kill(own_worker(running)["pid"], signal.SIGKILL)
            await running.reported(WorkerState.READY, restarts=restarts)
        assert own_worker(running)["failures"] == 0
        error = LinkError(code="unreachable", message="no hub answers", fix="look")
        running.link.show(LinkState.OFFLINE, error=error)
        assert not any("no hub answers" in text for text in events(running)), "the network needs a moment"
        clock.monotonic_by += 61
        running.link.show(LinkState.OFFLINE, error=error)
        assert "offline: no hub answers; look" in events(running)


@pytest.mark.asyncio
async def test_a_stopped_process_is_told_as_such(short_dir: Path) -> None:
    clock = ShiftedClock()
    async with supervisor_running(short_dir, clock=clock) as running:
        clock.monotonic_by += 30
        running.supervisor.tick()
        assert any(text.startswith("was stopped for 3") for text in events(running))
        assert running.link.woken == 1
        running.supervisor.tick()
        assert running.link.woken == 1


@pytest.mark.asyncio
async def test_a_clock_that_is_set_breaks_no_pause_and_no_since(short_dir: Path) -> None:
    clock = ShiftedClock()
    async with supervisor_running(short_dir, clock=clock) as running:
        await start_job(running, 0)
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause", seconds=HOUR)
        await eventually(lambda: state_of(running) == "PAUSED", "paused")
        began = running.sections()["node"]
        clock.wall_by += 24 * HOUR
        running.supervisor.tick()
        node = running.sections()["node"]
        assert state_of(running) == "PAUSED", "an hour has not passed"
        assert "the clock was set forward by 24 h" in events(running)
        for name in ("state_since", "started_at"):
            assert node[name] - began[name] == pytest.approx(24 * HOUR, abs=1)
        gate = next(gate for gate in node["why"] if gate["gate"] == "user_pause")
        assert gate["next_change_at"] == pytest.approx(time.time() + 25 * HOUR, abs=10)
        clock.wall_by -= 30 * HOUR
        running.supervisor.tick()
        gate = next(gate for gate in running.sections()["node"]["why"] if gate["gate"] == "user_pause")
        assert gate["next_change_at"] == pytest.approx(time.time() - 5 * HOUR, abs=10), "no day longer"
        clock.monotonic_by += HOUR
        running.supervisor.tick()
        assert state_of(running) != "PAUSED"
        await client.close()


@pytest.mark.asyncio
async def test_a_pause_until_a_time_of_day_follows_the_clock(short_dir: Path) -> None:
    clock = ShiftedClock()
    async with supervisor_running(short_dir, clock=clock) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause", until=clock.now() + HOUR)
        clock.wall_by += 2 * HOUR
        running.supervisor.tick()
        assert state_of(running) == "IDLE"
        await client.close()


@pytest.mark.asyncio
async def test_earnings_of_today_survive_a_clock_that_was_wrong_for_a_while(short_dir: Path) -> None:
    clock = ShiftedClock()
    async with supervisor_running(short_dir, clock=clock) as running:
        handler = running.link.handler
        handler.on_earnings(Earnings(confirmed_micro=5000))
        assert running.sections()["earnings"]["today_micro"] == 5000
        clock.wall_by += 72 * HOUR
        handler.on_earnings(Earnings(confirmed_micro=5500))
        assert running.sections()["earnings"]["today_micro"] == 500
        clock.wall_by -= 72 * HOUR
        handler.on_earnings(Earnings(confirmed_micro=6000))
        assert running.sections()["earnings"]["today_micro"] == 6000
