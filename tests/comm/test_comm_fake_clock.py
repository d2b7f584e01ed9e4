"""The fake clock: moves when told, wakes who is due, and its wall can jump."""

from __future__ import annotations

import asyncio
import threading

import pytest

from distensor.core.clock import Clock
from distensor.testing.clock import FakeClock


def test_it_is_a_clock_that_stands_still() -> None:
    clock: Clock = FakeClock(now=100.0, monotonic=5.0)
    assert (clock.now(), clock.now(), clock.monotonic()) == (100.0, 100.0, 5.0)


def test_time_passes_for_both_and_jumps_for_the_wall_only() -> None:
    clock = FakeClock(now=100.0, monotonic=5.0)
    clock.advance(2.5)
    clock.jump_wall(-3600)
    assert (clock.now(), clock.monotonic()) == (100.0 + 2.5 - 3600, 7.5)


def test_monotonic_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="jump_wall"):
        FakeClock().advance(-1)


def test_a_thread_sleeps_until_its_time_has_come() -> None:
    clock, woken = FakeClock(), threading.Event()
    thread = threading.Thread(target=lambda: (clock.sleep(10), woken.set()))
    thread.start()
    clock.wait_for_sleepers(1)
    clock.advance(9.99)
    assert not woken.is_set()
    assert clock.sleepers == 1
    clock.advance(0.01)
    thread.join(5)
    assert woken.is_set()


@pytest.mark.asyncio
async def test_tasks_wake_in_the_order_of_their_times() -> None:
    clock, order = FakeClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep_async(seconds)
        order.append(seconds)

    tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2, 0)]
    await asyncio.sleep(0)
    clock.advance(1.5)
    await asyncio.wait_for(asyncio.gather(tasks[1], tasks[3]), 5)
    assert order == [0, 1]
    clock.advance(10)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_a_cancelled_sleeper_does_no_harm() -> None:
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep_async(1))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    clock.advance(2)
    assert clock.sleepers == 0


def test_waiting_for_sleepers_ends() -> None:
    with pytest.raises(TimeoutError, match="expected 1"):
        FakeClock().wait_for_sleepers(1, timeout=0.01)
