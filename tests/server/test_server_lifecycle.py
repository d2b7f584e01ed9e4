"""The worker's state machine: by tables for what should happen, by random walks for what never may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.control import WorkerState
from distensor_server.exits import Exit, ExitCause
from distensor_server.lifecycle import (
    BecameConnected,
    BecameReady,
    Begin,
    ClearTimer,
    CloseStdin,
    Drain,
    Effect,
    Event,
    Kill,
    Life,
    ProcessEnded,
    ReportReady,
    ReportState,
    ResetBreaker,
    RestartPolicy,
    SendDrain,
    SetTimer,
    Spawn,
    Stop,
    TimerFired,
    Worked,
    step,
)

S = WorkerState
POLICY = RestartPolicy()
READY = BecameReady(port=1, csr_pem="csr")
CONNECTED = BecameConnected()
WORKED = Worked()
TIMER = TimerFired()
DRAIN = Drain(seconds=90, why="why")
STOP = Stop(why="why")
KILLED = ProcessEnded(exit=Exit(cause=ExitCause.SIGNAL, reason="killed by signal 9 (SIGKILL)"))
DONE = ProcessEnded(exit=Exit(cause=ExitCause.DONE, reason="ended by itself (exit 0)"))
REFUSED = ProcessEnded(exit=Exit(cause=ExitCause.REFUSED_PROGRAM, reason="refused the program (exit 65)"))


def after(*events: Event, policy: RestartPolicy = POLICY) -> tuple[Life, list[Effect]]:
    """The life after `events`, one second apart, and the effects of the last one."""
    life, effects = Life(), ()
    for now, event in enumerate(events):
        life, effects = step(life, event, now=float(now), policy=policy)
    return life, list(effects)


def report(state: WorkerState, restarts: int = 0, reason: str = "") -> ReportState:
    return ReportState(state=state, restarts=restarts, reason=reason)


WORDS = "killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ([Begin()], S.STARTING, [Spawn(), SetTimer(seconds=180.0), report(S.STARTING)]),
        ([Begin(), READY], S.READY, [ClearTimer(), ReportReady(port=1, csr_pem="csr"), report(S.READY)]),
        ([Begin(), READY, CONNECTED], S.RUNNING, [SetTimer(seconds=3600.0), report(S.RUNNING)]),
        ([Begin(), READY, CONNECTED, WORKED], S.RUNNING, []),
        ([Begin(), READY, READY], S.READY, [ClearTimer(), ReportReady(port=1, csr_pem="csr"), report(S.READY)]),
        (
            [Begin(), READY, CONNECTED, WORKED, READY],
            S.READY,
            [ClearTimer(), ReportReady(port=1, csr_pem="csr"), report(S.READY)],
        ),
        (
            [Begin(), READY, CONNECTED, READY, CONNECTED],
            S.RUNNING,
            [SetTimer(seconds=3600.0), report(S.RUNNING)],
        ),
        ([Begin(), READY, CONNECTED, WORKED, TIMER], S.RUNNING, [SetTimer(seconds=3599.0)]),
        ([Begin(), TIMER], S.STARTING, [Kill(why="was not ready within 180 s"), SetTimer(seconds=5.0)]),
        (
            [Begin(), READY, KILLED],
            S.BACKOFF,
            [SetTimer(seconds=0.5), report(S.EXITED, reason=WORDS), report(S.BACKOFF, reason=WORDS)],
        ),
        (
            [Begin(), READY, KILLED, TIMER],
            S.STARTING,
            [Spawn(), SetTimer(seconds=180.0), report(S.STARTING, 1, WORDS)],
        ),
        (
            [Begin(), READY, KILLED, TIMER, READY],
            S.READY,
            [ClearTimer(), ReportReady(port=1, csr_pem="csr"), report(S.READY, 1, WORDS)],
        ),
        (
            [Begin(), READY, KILLED, TIMER, READY, CONNECTED],
            S.RUNNING,
            [SetTimer(seconds=3600.0), report(S.RUNNING, 1)],
        ),
        ([Begin(), REFUSED], S.EXITED, [ClearTimer(), report(S.EXITED, reason="refused the program (exit 65)")]),
        ([Begin(), READY, CONNECTED, DONE], S.EXITED, [ClearTimer(), report(S.EXITED, reason=DONE.exit.reason)]),
        ([Begin(), DRAIN], S.DRAINING, [CloseStdin(), SetTimer(seconds=5.0), report(S.DRAINING)]),
        ([Begin(), READY, STOP], S.DRAINING, [CloseStdin(), SetTimer(seconds=5.0), report(S.DRAINING)]),
        (
            [Begin(), READY, CONNECTED, DRAIN],
            S.DRAINING,
            [SendDrain(seconds=90), SetTimer(seconds=90), report(S.DRAINING)],
        ),
        ([Begin(), READY, CONNECTED, DRAIN, TIMER], S.DRAINING, [CloseStdin(), SetTimer(seconds=5.0)]),
        (
            [Begin(), READY, CONNECTED, DRAIN, TIMER, TIMER],
            S.DRAINING,
            [Kill(why="did not end in time"), SetTimer(seconds=5.0)],
        ),
        ([Begin(), READY, CONNECTED, DRAIN, STOP], S.DRAINING, [CloseStdin(), SetTimer(seconds=5.0)]),
        ([Begin(), READY, CONNECTED, STOP, STOP], S.DRAINING, []),
        ([Begin(), READY, CONNECTED, DRAIN, DONE], S.EXITED, [ClearTimer(), report(S.EXITED, reason="why")]),
        ([Begin(), STOP, KILLED], S.EXITED, [ClearTimer(), report(S.EXITED, reason=f"why; {WORDS}")]),
        ([Begin(), READY, KILLED, STOP], S.EXITED, [ClearTimer(), report(S.EXITED, reason=WORDS)]),
        ([STOP], S.EXITED, [ClearTimer(), report(S.EXITED, reason="why")]),
        ([STOP, Begin()], S.EXITED, []),
        ([Begin(), REFUSED, Begin()], S.EXITED, []),
        ([Begin(), REFUSED, STOP], S.EXITED, []),
        ([Begin(), STOP, READY, CONNECTED], S.DRAINING, []),
    ],
)
def test_transitions(events: Sequence[Event], state: WorkerState, effects: list[Effect]) -> None:
    life, done = after(*events)
    assert (life.state, done) == (state, effects)


def test_the_breaker_opens_after_failures_in_a_row_and_can_be_reset() -> None:
    life, _ = after(Begin())
    for failure in range(1, POLICY.failures_to_break):
        life, _ = step(life, KILLED, now=failure, policy=POLICY)
        assert life.state is S.BACKOFF
        life, _ = step(life, TIMER, now=failure, policy=POLICY)
    life, effects = step(life, KILLED, now=10, policy=POLICY)
    assert life.state is S.BROKEN
    assert effects == (ClearTimer(), report(S.EXITED, 4, WORDS), report(S.BROKEN, 4, WORDS))
    assert step(life, TIMER, now=11, policy=POLICY) == (life, ())
    life, effects = step(life, ResetBreaker(), now=12, policy=POLICY)
    assert (life.state, life.failures, life.restarts) == (S.STARTING, 0, 5)
    assert effects[0] == Spawn()


def test_a_worker_that_finishes_nothing_is_ended_with_that_reason_and_a_slow_one_is_not() -> None:
    policy = RestartPolicy(step_within=100.0)
    life, _ = after(Begin(), READY, CONNECTED, policy=policy)
    for now in range(90, 900, 90):
        life, _ = step(life, WORKED, now=now, policy=policy)
        life, effects = step(life, TIMER, now=now + 89, policy=policy)
        assert effects == (SetTimer(seconds=11.0),)
    stuck = (Kill(why="finished no step within 100 s"), SetTimer(seconds=5.0))
    life, effects = step(life, TIMER, now=1000, policy=policy)
    assert effects == stuck
    life, effects = step(life, TIMER, now=1005, policy=policy)
    assert effects == stuck, "as long as the process stays"
    life, _ = step(life, KILLED, now=1006, policy=policy)
    assert (life.state, life.failures, life.worked_at) == (S.BACKOFF, 1, None)


def test_failures_after_a_sleep_do_not_count_but_not_for_ever() -> None:
    excused = replace(KILLED, excused=True)
    life, _ = after(Begin())
    failures = []
    for now in range(1, 9):
        life, _ = step(life, excused, now=now, policy=POLICY)
        failures.append(life.failures)
        life, _ = step(life, TIMER, now=now, policy=POLICY)
    assert failures == [0, 0, 0, 1, 1, 1, 1, 2]
    ready, _ = step(life, READY, now=10, policy=POLICY)
    well, _ = step(ready, excused, now=10 + POLICY.healthy_after, policy=POLICY)
    assert (well.failures, well.excuses) == (0, 1)


def test_without_a_limit_a_running_worker_has_no_timer() -> None:
    assert after(Begin(), READY, CONNECTED, policy=RestartPolicy(step_within=0))[1] == [report(S.RUNNING)]


def test_what_was_broken_before_stays_broken_and_is_told() -> None:
    life = Life(state=S.BROKEN, failures=5, restarts=4, last_exit=WORDS)
    assert step(life, Begin(), now=1, policy=POLICY) == (life, (report(S.BROKEN, 4, WORDS),))
    assert step(life, ResetBreaker(), now=1, policy=POLICY)[0].state is S.STARTING


def test_a_worker_that_was_healthy_for_long_starts_counting_anew() -> None:
    life = replace(after(Begin(), READY)[0], failures=4, up_since=0.0)
    sick, _ = step(life, KILLED, now=POLICY.healthy_after - 1, policy=POLICY)
    well, _ = step(life, KILLED, now=POLICY.healthy_after, policy=POLICY)
    assert (sick.state, sick.failures) == (S.BROKEN, 5)
    assert (well.state, well.failures) == (S.BACKOFF, 1)


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_delays_grow_to_the_cap_and_are_spread(failures: int, draw: float) -> None:
    delay = POLICY.delay(failures, draw)
    whole = min(60.0, 0.5 * 2.0 ** min(failures - 1, 64))
    assert whole * 0.75 <= delay <= whole
    assert POLICY.delay(failures + 1, draw) >= delay


EVENTS = st.one_of(
    st.sampled_from([Begin(), READY, CONNECTED, WORKED, TIMER, DRAIN, STOP, ResetBreaker(), KILLED, DONE, REFUSED]),
    st.builds(ProcessEnded, exit=st.just(KILLED.exit), draw=st.floats(0, 1, exclude_max=True)),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 200)), max_size=60))
def test_nothing_that_must_never_happen_happens(walk: list[tuple[Event, float]]) -> None:
    life, now, process, timer, restarts, ending = Life(), 0.0, False, False, 0, False
    for event, seconds in walk:
        if not {ProcessEnded: process, TimerFired: timer}.get(type(event), True):
            continue  # a process that does not exist cannot end, nor a timer that is not set fire
        now += seconds
        before = life
        life, effects = step(life, event, now=now, policy=POLICY)
        process = process and not isinstance(event, ProcessEnded)
        timer = timer and not isinstance(event, TimerFired)
        for effect in effects:
            match effect:
                case Spawn():
                    assert not process, "two processes for one rank"
                    assert not ending, "came back after it was told to go"
                    process = True
                case SetTimer(seconds=wait):
                    assert wait >= 0
                    timer = True
                case ClearTimer():
                    timer = False
                case ReportState(restarts=told):
                    assert told == life.restarts
        ending = ending or bool(life.ending)
        assert life.alive == process
        assert life.restarts >= restarts
        restarts = life.restarts
        assert (life.state is S.BACKOFF) == (life.retry_at is not None)
        assert life.state is before.state or life.since == now
        assert timer or life.state in (S.EXITED, S.BROKEN, S.READY, S.RUNNING), "nothing would ever happen again"


@given(st.lists(EVENTS, max_size=30))
def test_every_life_can_be_ended(walk: list[Event]) -> None:
    life = Life()
    for event in walk:
        if not isinstance(event, ProcessEnded) or life.alive:
            life, _ = step(life, event, now=0.0, policy=POLICY)
    life, _ = step(life, STOP, now=1.0, policy=POLICY)
    if life.alive:
        life, _ = step(life, TIMER, now=6.0, policy=POLICY)
        life, _ = step(life, KILLED, now=6.1, policy=POLICY)
    assert life.state is S.EXITED
    for event in (Begin(), TIMER, READY, ResetBreaker()):
        assert step(life, event, now=7.0, policy=POLICY) == (life, ())
