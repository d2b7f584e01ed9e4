"""The life of one worker as a pure state machine: events in, effects out, no clock and no process.

    STARTING --ready--> READY --connected--> RUNNING --ready again, for another epoch--> READY
       ^  \\               \\                   |  drain
       |   +----exit--------+----exit----------+        drain, stop
    BACKOFF <--- may come back ---+            |  +---> DRAINING --exit--> EXITED
       ^                          +--> EXITED (final cause)
       +-- reset -- BROKEN <-- too many failures in a row

One timer at most is set at any time; what it means follows from the state. Pairs of state and event that the table
does not list change nothing: a late line of a process that is being stopped is normal, not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from distensor.core.control import WorkerState
from distensor_server.exits import Exit, ExitCause


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a worker comes back, and how long it may take for things. Seconds."""

    first_delay: float = 0.5
    factor: float = 2.0
    longest_delay: float = 60.0
    spread: float = 0.25
    """Jitter: a delay is drawn from delay * (1 - spread) to delay, so that nodes do not restart in step."""
    failures_to_break: int = 5
    most_excuses: int = 3
    """So many failures in a row after a sleep do not count; one that goes on failing then is sick all the same."""
    healthy_after: float = 120.0
    """A worker that was up for so long starts counting its failures anew."""
    ready_within: float = 180.0
    step_within: float = 3600.0
    """A running worker that gives no sign of work for so long is ended; 0: never."""
    stop_grace: float = 5.0

    def delay(self, failures: int, draw: float) -> float:
        """The wait before the next start after `failures` in a row; `draw` is a random number in [0, 1)."""
        # The exponent is bounded because 2.0 ** 1100 overflows; the cap holds long before.
        whole = min(self.longest_delay, self.first_delay * self.factor ** min(failures - 1, 64))
        return whole * (1 - self.spread * draw)


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """All that the machine remembers of a worker."""

    state: WorkerState = WorkerState.EXITED
    since: float = 0.0
    restarts: int = 0
    failures: int = 0
    up_since: float | None = None
    worked_at: float | None = None
    """When it last finished a step or a load."""
    retry_at: float | None = None
    excuses: int = 0
    """Failures in a row that did not count because the machine had slept."""
    last_exit: str = ""
    cause: ExitCause | None = None
    """Of the last exit in this life of the supervisor."""
    ending: str = ""
    """Why it is being stopped on purpose; not empty means that it will not come back."""
    told_to_exit: bool = False
    """Its input has been closed; what follows in DRAINING is a kill."""

    @property
    def alive(self) -> bool:
        """A process exists or is being created."""
        return self.state in _WITH_PROCESS

    @property
    def wanted(self) -> bool:
        """It has its place: a process exists, or will be started (for the first time or again)."""
        return not self.ending and (self.state is not WorkerState.EXITED or not self.last_exit)


_WITH_PROCESS = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.RUNNING, WorkerState.DRAINING})


# Events


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """An assignment arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BecameReady:
    port: int
    csr_pem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BecameConnected:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Worked:
    """It finished something: a step, a load, an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEnded:
    """The process is gone (or never came up). `draw` is a random number in [0, 1)."""

    exit: Exit
    draw: float = 0.0
    excused: bool = False
    """It does not count as a failure: the machine slept, and what the worker lost was lost by that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerFired:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Finish what is running, at most for `seconds`, then go."""

    seconds: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Go now."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetBreaker:
    pass


Event: TypeAlias = (
    Begin | BecameReady | BecameConnected | Worked | ProcessEnded | TimerFired | Drain | Stop | ResetBreaker
)


# Effects


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class SendDrain:
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseStdin:
    """The worker's sign to exit at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """SIGKILL to the whole process group."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Replaces the timer that may be set."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearTimer:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportReady:
    port: int
    csr_pem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportState:
    state: WorkerState
    restarts: int
    reason: str = ""


Effect: TypeAlias = Spawn | SendDrain | CloseStdin | Kill | SetTimer | ClearTimer | ReportReady | ReportState

Transition: TypeAlias = tuple[Life, tuple[Effect, ...]]


def step(life: Life, event: Event, *, now: float, policy: RestartPolicy) -> Transition:
    """The next life and what has to be done for it. `now` is monotonic time."""
    handler = _TABLE.get((life.state, type(event)))
    if handler is None:
        return life, ()
    after, effects = handler(life, event, now, policy)
    if after.state is not life.state:
        after = replace(after, since=now)
    return after, effects


def _begin(life: Life, _event: Event, _now: float, policy: RestartPolicy) -> Transition:
    return _start(life, policy) if life.wanted else (life, ())


def _still_broken(life: Life, _event: Event, _now: float, _policy: RestartPolicy) -> Transition:
    """It broke before this supervisor started: the hub has to hear that it will not come by itself."""
    return life, (_report(life),)


def _start(life: Life, policy: RestartPolicy) -> Transition:
    after = replace(life, state=WorkerState.STARTING, retry_at=None, up_since=None)
    return after, (Spawn(), SetTimer(seconds=policy.ready_within), _report(after))


def _restart(life: Life, _event: Event, _now: float, policy: RestartPolicy) -> Transition:
    return _start(replace(life, restarts=life.restarts + 1), policy)


def _reset(life: Life, event: Event, now: float, policy: RestartPolicy) -> Transition:
    return _restart(replace(life, failures=0), event, now, policy)


def _ready(life: Life, event: Event, now: float, _policy: RestartPolicy) -> Transition:
    assert isinstance(event, BecameReady)
    after = replace(life, state=WorkerState.READY, up_since=now)
    return after, (ClearTimer(), ReportReady(port=event.port, csr_pem=event.csr_pem), _report(after))


def _ready_again(life: Life, event: Event, _now: float, _policy: RestartPolicy) -> Transition:
    """It is to go on in another epoch, and has kept what it holds; no timer while it waits for the others."""
    assert isinstance(event, BecameReady)
    after = replace(life, state=WorkerState.READY)
    return after, (ClearTimer(), ReportReady(port=event.port, csr_pem=event.csr_pem), _report(after))


def _connected(life: Life, _event: Event, now: float, policy: RestartPolicy) -> Transition:
    after = replace(life, state=WorkerState.RUNNING, worked_at=now)
    watch = (SetTimer(seconds=policy.step_within),) if policy.step_within else ()
    return after, (*watch, _report(after))


def _worked(life: Life, _event: Event, now: float, _policy: RestartPolicy) -> Transition:
    """The timer is left alone, because steps may come a hundred times a second: it looks here when it fires."""
    return replace(life, worked_at=now), ()


def _maybe_stuck(life: Life, _event: Event, now: float, policy: RestartPolicy) -> Transition:
    """A kill is repeated as long as the process stays: it may sit in a driver."""
    assert life.worked_at is not None
    left = policy.step_within - (now - life.worked_at)
    if left > 0:
        return life, (SetTimer(seconds=left),)
    return life, (Kill(why=f"finished no step within {policy.step_within:g} s"), SetTimer(seconds=policy.stop_grace))


def _too_slow(life: Life, _event: Event, _now: float, policy: RestartPolicy) -> Transition:
    why = f"was not ready within {policy.ready_within:g} s"
    return life, (Kill(why=why), SetTimer(seconds=policy.stop_grace))


def _ended(life: Life, event: Event, now: float, policy: RestartPolicy) -> Transition:
    assert isinstance(event, ProcessEnded)
    gone = replace(life, state=WorkerState.EXITED, last_exit=event.exit.reason, up_since=None, worked_at=None)
    gone = replace(gone, cause=event.exit.cause)
    if event.exit.final:
        return gone, (ClearTimer(), _report(gone))
    healthy = life.up_since is not None and now - life.up_since >= policy.healthy_after
    excuses = 0 if healthy else life.excuses
    excused = event.excused and excuses < policy.most_excuses
    failures = (0 if healthy else life.failures) + (not excused)
    gone = replace(gone, excuses=excuses + 1 if excused else 0)
    if failures >= policy.failures_to_break:
        broken = replace(gone, state=WorkerState.BROKEN, failures=failures)
        return broken, (ClearTimer(), _report(gone), _report(broken))
    delay = policy.delay(max(1, failures), event.draw)
    waiting = replace(gone, state=WorkerState.BACKOFF, failures=failures, retry_at=now + delay)
    return waiting, (SetTimer(seconds=delay), _report(gone), _report(waiting))


def _drain(life: Life, event: Event, _now: float, _policy: RestartPolicy) -> Transition:
    assert isinstance(event, Drain)
    after = replace(life, state=WorkerState.DRAINING, ending=event.why)
    return after, (SendDrain(seconds=event.seconds), SetTimer(seconds=event.seconds), _report(after))


def _stop(life: Life, event: Event, _now: float, policy: RestartPolicy) -> Transition:
    """Nothing is worth finishing: end of input is the sign to go, and a kill follows after the grace."""
    assert isinstance(event, Drain | Stop)
    after = replace(life, state=WorkerState.DRAINING, ending=event.why, told_to_exit=True)
    return after, (CloseStdin(), SetTimer(seconds=policy.stop_grace), _report(after))


def _stop_draining(life: Life, _event: Event, _now: float, policy: RestartPolicy) -> Transition:
    if life.told_to_exit:
        return life, ()
    return replace(life, told_to_exit=True), (CloseStdin(), SetTimer(seconds=policy.stop_grace))


def _drain_overdue(life: Life, event: Event, now: float, policy: RestartPolicy) -> Transition:
    """First end of input, then a kill. A kill is repeated as long as the process stays: it may sit in a driver."""
    if not life.told_to_exit:
        return _stop_draining(life, event, now, policy)
    return life, (Kill(why="did not end in time"), SetTimer(seconds=policy.stop_grace))


def _drained(life: Life, event: Event, _now: float, _policy: RestartPolicy) -> Transition:
    assert isinstance(event, ProcessEnded)
    clean = event.exit.cause is ExitCause.DONE
    reason = life.ending if clean else f"{life.ending}; {event.exit.reason}"
    after = replace(life, state=WorkerState.EXITED, last_exit=reason, up_since=None)
    return after, (ClearTimer(), _report(after))


def _give_up(life: Life, event: Event, _now: float, _policy: RestartPolicy) -> Transition:
    """Stopped while no process exists. The last exit stays: it is what the owner wants to know."""
    assert isinstance(event, Drain | Stop)
    last_exit = life.last_exit or event.why
    after = replace(life, state=WorkerState.EXITED, ending=event.why, retry_at=None, last_exit=last_exit)
    return after, (ClearTimer(), _report(after))


def _stop_exited(life: Life, event: Event, now: float, policy: RestartPolicy) -> Transition:
    """One that has not begun yet must not begin; one that has ended only learns that this is for good."""
    assert isinstance(event, Drain | Stop)
    if life.wanted:
        return _give_up(life, event, now, policy)
    return replace(life, ending=life.ending or event.why), ()


def _report(life: Life) -> ReportState:
    """The reason of the last end is repeated while it is the news: after a restart until the worker runs again."""
    reason = "" if life.state is WorkerState.RUNNING else life.last_exit
    return ReportState(state=life.state, restarts=life.restarts, reason=reason)


_Handler: TypeAlias = Callable[[Life, Event, float, RestartPolicy], Transition]
_S = WorkerState

_TABLE: dict[tuple[WorkerState, type[Event]], _Handler] = {
    (_S.EXITED, Begin): _begin,
    (_S.EXITED, Drain): _stop_exited,
    (_S.EXITED, Stop): _stop_exited,
    (_S.STARTING, BecameReady): _ready,
    (_S.STARTING, ProcessEnded): _ended,
    (_S.STARTING, TimerFired): _too_slow,
    (_S.STARTING, Drain): _stop,
    (_S.STARTING, Stop): _stop,
    (_S.READY, BecameReady): _ready_again,
    (_S.READY, BecameConnected): _connected,
    (_S.READY, ProcessEnded): _ended,
    (_S.READY, Drain): _stop,
    (_S.READY, Stop): _stop,
    (_S.RUNNING, BecameReady): _ready_again,
    (_S.RUNNING, Worked): _worked,
    (_S.RUNNING, TimerFired): _maybe_stuck,
    (_S.RUNNING, ProcessEnded): _ended,
    (_S.RUNNING, Drain): _drain,
    (_S.RUNNING, Stop): _stop,
    (_S.DRAINING, ProcessEnded): _drained,
    (_S.DRAINING, TimerFired): _drain_overdue,
    (_S.DRAINING, Stop): _stop_draining,
    (_S.BACKOFF, TimerFired): _restart,
    (_S.BACKOFF, Drain): _give_up,
    (_S.BACKOFF, Stop): _give_up,
    (_S.BROKEN, Begin): _still_broken,
    (_S.BROKEN, ResetBreaker): _reset,
    (_S.BROKEN, Drain): _give_up,
    (_S.BROKEN, Stop): _give_up,
}
