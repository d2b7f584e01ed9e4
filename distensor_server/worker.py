"""One assigned rank: runs the lifecycle's effects on a real process and tells its owner what happens."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distensor.core.clock import Clock
from distensor.core.control import Assignment, Certificate, Topology, WorkerChange, WorkerReady
from distensor_server.environment import MARK_VARIABLE, scrubbed
from distensor_server.exits import Evidence, Exit, ExitCause, name_exit
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
from distensor_server.lines import Oversize
from distensor_server.messages import (
    NO_PACE,
    Claim,
    Connected,
    Failed,
    Garbage,
    Note,
    Progress,
    Ready,
    drain_line,
    parse_worker_line,
    reassign_line,
    topology_line,
)
from distensor_server.picture import WorkerView
from distensor_server.process import WorkerProcess
from distensor_server.rates import LinkMeter

MAX_GARBAGE = 100
"""So many lines in one life that are not the protocol, and the process is not a worker of ours."""


class WorkerOwner(Protocol):
    """What a worker tells the supervisor. Called in the event loop."""

    def on_report(self, report: WorkerReady | WorkerChange) -> None: ...

    def on_claim(self, assignment: Assignment, claim: Claim) -> None: ...

    def on_process(self, *, started: int | None = None, ended: int | None = None) -> None: ...

    def on_event(self, severity: str, source: str, text: str) -> None: ...

    def on_change(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a worker's process is started."""

    command: Sequence[str]
    assign: bytes
    log_path: Path
    mark: str
    extra_environment: tuple[tuple[str, str], ...] = ()


class Worker:
    """All methods belong to the event loop."""

    def __init__(
        self,
        assignment: Assignment,
        launch: Launch,
        owner: WorkerOwner,
        *,
        clock: Clock,
        oom_kills: Callable[[], int],
        excused: Callable[[], bool] = lambda: False,
        policy: Callable[[], RestartPolicy] = RestartPolicy,
        life: Life | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.assignment = assignment
        self.life = life or Life()
        self.progress: Progress | None = None
        self.gone = asyncio.Event()
        """Set while no process exists and none will be started."""
        self.rss: int | None = None
        self._launch = launch
        self._owner = owner
        self._clock = clock
        self._oom_kills = oom_kills
        self._excused = excused
        self._policy = policy
        self._draw = draw
        self._process: WorkerProcess | None = None
        self._meter = LinkMeter()
        self._timer: asyncio.Task[None] | None = None
        self._spawning: asyncio.Task[None] | None = None
        self._failure: Failed | None = None
        self._kill_reason = ""
        self._garbage = 0
        self._ready_in: int | None = None
        self._pace = NO_PACE
        self._oom_before = 0
        self._since = clock.now()

    @property
    def name(self) -> str:
        return self.assignment.worker_id

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        self._happen(Begin())

    def drain(self, seconds: float, why: str) -> None:
        self._happen(Drain(seconds=seconds, why=why))

    def stop(self, why: str) -> None:
        self._happen(Stop(why=why))

    def reset_breaker(self) -> None:
        self._happen(ResetBreaker())

    def clock_was_set(self, by: float) -> None:
        """`since` is wall time: it moves along."""
        self._since += by

    def set_pace(self, line: bytes) -> None:
        """How fast the worker may go; holds also for the processes that follow this one."""
        if line != self._pace:
            self._pace = line
            if self._process is not None:
                self._process.send(line)

    def reassign(self, assignment: Assignment, launch: Launch) -> None:
        """Go on as another rank of a later epoch: the process where there is one, else the one that follows it."""
        self.assignment, self._launch = assignment, launch
        if self._process is not None:
            self._process.send(reassign_line(assignment))
        self._owner.on_change()

    def grant(self, topology: Topology, certificate: Certificate) -> None:
        if self._process is not None:
            self._process.send(topology_line(topology, certificate))

    def view(self) -> WorkerView:
        now = self._clock.monotonic()
        return WorkerView(
            worker_id=self.assignment.worker_id,
            assignment=self.assignment,
            life=self.life,
            since=self._since,
            pid=self.pid,
            progress=self.progress,
            links=self._meter.rates(now),
            rss=self.rss,
            retry_at=self._retry_at(now),
        )

    def _retry_at(self, now: float) -> float | None:
        at = self.life.retry_at
        # To the second: the difference of two clocks that tick apart would be news each time.
        return None if at is None else float(round(self._clock.now() + at - now))

    # Events in

    def _happen(self, event: Event) -> None:
        before = self.life.state
        self.life, effects = step(self.life, event, now=self._clock.monotonic(), policy=self._policy())
        if self.life.state is not before:
            self._since = self._clock.now()
        for effect in effects:
            self._do(effect)
        if self.life.alive or self.life.retry_at is not None:
            self.gone.clear()
        else:
            self.gone.set()
        self._owner.on_change()

    def _on_line(self, line: bytes | Oversize) -> None:
        if isinstance(line, Oversize):
            self._on_garbage(Garbage(reason=f"a line of over {line.limit} bytes", sample=""))
            return
        match parse_worker_line(line):
            case Ready() as ready:
                self._on_ready(ready)
            case Connected():
                self._happen(BecameConnected())
            case Progress() as progress:
                self._on_progress(progress)
            case Claim() as claim:
                self._owner.on_claim(self.assignment, claim)
            case Note(severity=severity, text=text):
                self._owner.on_event(severity, self.name, text)
            case Failed() as failed:
                self._failure = failed
                self._owner.on_event("error", self.name, f"{failed.code}: {failed.message}")
            case Garbage() as garbage:
                self._on_garbage(garbage)

    def _on_ready(self, ready: Ready) -> None:
        """Once in each epoch; one of another epoch has not read yet where it is to go on."""
        epoch = self.assignment.epoch
        if ready.epoch in (None, epoch) and self._ready_in != epoch:
            self._ready_in = epoch
            self._happen(BecameReady(port=ready.port, csr_pem=ready.csr_pem))

    def _on_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.rss = progress.rss
        self._meter.update(progress.links, self._clock.monotonic())
        self._happen(Worked())

    def _on_garbage(self, garbage: Garbage) -> None:
        self._garbage += 1
        if self._garbage == 1:
            sample = f" ({garbage.sample!r})" if garbage.sample else ""
            text = f"wrote a line that is not the protocol: {garbage.reason}{sample}"
            self._owner.on_event("warning", self.name, text)
        if self._garbage == MAX_GARBAGE:
            self._kill(f"wrote {MAX_GARBAGE} lines that are not the protocol")

    def _on_end(self, code: int) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._owner.on_process(ended=process.pid)
        told = self._failure or Failed(code="", message="")
        ended = name_exit(
            code,
            Evidence(
                told_code=told.code,
                told_message=told.message,
                last_error_line=process.last_error_line[:300],
                kernel_killed_for_memory=self._oom_kills() > self._oom_before,
                ended_by_us=self._kill_reason,
            ),
        )
        self._process_ended(ended)

    def _process_ended(self, ended: Exit) -> None:
        self.rss = None
        expected = bool(self.life.ending)
        severity = "info" if expected or ended.cause is ExitCause.DONE else "error"
        self._happen(ProcessEnded(exit=ended, draw=self._draw(), excused=self._excused()))
        self._owner.on_event(severity, self.name, self._describe_end(ended))

    def _describe_end(self, ended: Exit) -> str:
        words = f"worker of rank {self.assignment.rank} ended: {ended.reason}"
        if self.life.retry_at is not None:
            wait = self.life.retry_at - self._clock.monotonic()
            return f"{words}; restart {self.life.restarts + 1} in {wait:.1f} s"
        if self.life.failures >= self._policy().failures_to_break:
            return f"{words}; {self.life.failures} failures in a row: not restarted until `distensor retry`"
        return words

    # Effects out

    def _do(self, effect: Effect) -> None:
        match effect:
            case Spawn():
                self._spawning = asyncio.get_running_loop().create_task(self._spawn())
            case Kill(why=why):
                self._kill(why)
            case SetTimer(seconds=seconds):
                self._set_timer(seconds)
            case ClearTimer():
                self._clear_timer()
            case SendDrain() | CloseStdin():
                self._tell_process(effect)
            case ReportReady() | ReportState():
                self._report(effect)

    def _tell_process(self, effect: SendDrain | CloseStdin) -> None:
        if self._process is None:
            return
        if isinstance(effect, SendDrain):
            self._process.send(drain_line(effect.seconds))
        else:
            self._process.close_stdin()

    def _report(self, report: ReportReady | ReportState) -> None:
        a = self.assignment
        if isinstance(report, ReportReady):
            ready = WorkerReady(job_id=a.job_id, epoch=a.epoch, rank=a.rank, port=report.port, csr_pem=report.csr_pem)
            self._owner.on_report(ready)
            return
        change = WorkerChange(
            job_id=a.job_id,
            epoch=a.epoch,
            rank=a.rank,
            state=report.state,
            restarts=report.restarts,
            reason=report.reason,
        )
        self._owner.on_report(change)

    def _kill(self, why: str) -> None:
        self._kill_reason = self._kill_reason or why
        if self._process is not None:
            self._process.kill()

    async def _spawn(self) -> None:
        self._failure, self._kill_reason, self._garbage = None, "", 0
        self._ready_in = None
        self._meter = LinkMeter()
        self._oom_before = self._oom_kills()
        try:
            process = await self._start_process()
        except OSError as error:
            reason = f"could not be started: {error}"
            self._process_ended(Exit(cause=ExitCause.NOT_STARTED, reason=reason))
            return
        self._process = process
        self._owner.on_process(started=process.pid)
        process.send(self._launch.assign)
        if self._pace != NO_PACE:
            process.send(self._pace)
        if self.life.ending:
            # It was told to stop while it was being created: the close of its input went nowhere.
            process.close_stdin()

    async def _start_process(self) -> WorkerProcess:
        extra = {
            MARK_VARIABLE: self._launch.mark,
            **dict(self._launch.extra_environment),
        }
        return await WorkerProcess.start(
            self._launch.command,
            environment=scrubbed(os.environ, extra),
            log_path=self._launch.log_path,
            on_line=self._on_line,
            on_end=self._on_end,
        )

    def _set_timer(self, seconds: float) -> None:
        self._clear_timer()
        self._timer = asyncio.get_running_loop().create_task(self._wait(seconds))

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, seconds: float) -> None:
        await self._clock.sleep_async(seconds)
        # Forgotten before the event: its effects may set a new timer, and that one must not cancel this task.
        self._timer = None
        self._happen(TimerFired())
