"""The share of its time in which a worker computes, and its caps, as the supervisor's lines say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.node.ipc import Mailbox
from distensor.node.pacer import LEAST_DUTY, Pacer
from distensor.testing.clock import FakeClock


class SleepingClock(FakeClock):
    """One thread: to sleep is to let the time pass."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class Plane:
    def __init__(self) -> None:
        self.rates: list[tuple[float | None, float | None]] = []

    def limit_rates(self, *, send: float | None, receive: float | None) -> None:
        self.rates.append((send, receive))


@settings(max_examples=30, deadline=None)
@given(duty=st.floats(LEAST_DUTY, 1.0), works=st.lists(st.floats(0.001, 3.0), min_size=1, max_size=20))
def test_the_mean_duty_is_right(duty: float, works: list[float]) -> None:
    clock = SleepingClock()
    pacer = Pacer(clock)
    pacer.obey({"type": "pace", "duty": duty})
    started = clock.monotonic()
    for work in works:
        clock.advance(work)
        pacer.rest(work)
    # A rest may end a microsecond early, and the shortest work is a millisecond.
    assert sum(works) / (clock.monotonic() - started) == pytest.approx(duty, rel=1.1e-3)


def test_at_full_duty_nobody_sleeps() -> None:
    class Sleepless(FakeClock):
        def sleep(self, seconds: float) -> None:
            raise AssertionError(f"slept {seconds} s")

    Pacer(Sleepless()).rest(5.0)


def test_a_rest_ends_soon_after_the_duty_rises() -> None:
    class Rising(SleepingClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            pacer.obey({"duty": 1.0})

    clock = Rising()
    pacer = Pacer(clock)
    pacer.obey({"duty": 0.1})
    started = clock.monotonic()
    pacer.rest(10.0)
    assert clock.monotonic() - started < 0.3


@pytest.mark.parametrize(
    ("message", "duty", "rates"),
    [
        ({"duty": 0.5, "send_rate": 1000, "receive_rate": None}, 0.5, (1000.0, None)),
        ({"duty": 0.001}, LEAST_DUTY, (None, None)),
        ({"duty": "half", "send_rate": "much", "receive_rate": -1}, 1.0, (None, None)),
        ({"duty": float("nan"), "send_rate": float("inf"), "receive_rate": True}, 1.0, (None, None)),
    ],
)
def test_lines_of_the_supervisor(
    message: dict[str, Any], duty: float, rates: tuple[float | None, float | None]
) -> None:
    pacer, plane = Pacer(FakeClock()), Plane()
    Mailbox(on_pace=pacer.obey).deliver({"type": "pace", **message})
    pacer.attach(plane)  # type: ignore[arg-type]
    assert pacer.duty == duty
    assert plane.rates == [rates]
    pacer.obey({"duty": 1.0})
    assert plane.rates[-1] == (None, None)


def test_a_pace_line_is_queued_before_nothing() -> None:
    mailbox = Mailbox(on_pace=lambda _message: None)
    mailbox.deliver({"type": "pace", "duty": 0.5})
    mailbox.deliver({"type": "topology"})
    assert mailbox.take() == {"type": "topology"}
