"""The supervisor: brings devices, hub link, workers and the local socket together, and ends them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import IntEnum
from typing import Any

from distensor import __version__
from distensor.comm import LinkState, LinkStatus
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.control import (
    Assignment,
    Certificate,
    Earnings,
    NodeInfo,
    Topology,
    Unit,
    UnitKey,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.errors import ConfigError, StoreError
from distensor.core.ids import Epoch, JobId
from distensor_server.books import Books
from distensor_server.config import Limits, Settings, is_loopback
from distensor_server.devices.detect import Detector
from distensor_server.devices.host import Host
from distensor_server.holds import is_over, load_hold, parse_drain, parse_pause, save_hold
from distensor_server.hublink import LinkFactory
from distensor_server.inventory import Inventory
from distensor_server.lifecycle import RestartPolicy
from distensor_server.localserver import LocalServer, RequestError
from distensor_server.messages import Claim
from distensor_server.nodestate import node_state
from distensor_server.notify import Notifier
from distensor_server.orphans import WorkerRegistry, end_orphans
from distensor_server.picture import EventLog, Hold, HoldKind, LoggedEvent, Picture
from distensor_server.sections import Sections, build_sections
from distensor_server.statedir import StateDirectory
from distensor_server.workforce import WorkerSetup, Workforce

WORKER_COMMAND: Sequence[str] = (sys.executable, "-m", "distensor.node")
SAMPLE_SECONDS = 2.0
PUBLISH_SECONDS = 0.25
PAUSE_DRAIN_SECONDS = 10.0
FAREWELL_SECONDS = 1.5

log = logging.getLogger("distensor_server")


class StopMode(IntEnum):
    """How urgent the end is."""

    DRAIN = 1
    NOW = 2


class Supervisor:
    """One node. `run` returns when it has been stopped and every worker is gone.

    All callbacks and methods belong to the event loop of `run`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        make_link: LinkFactory,
        worker_command: Sequence[str] = WORKER_COMMAND,
        detector: Detector | None = None,
        host: Host | None = None,
        policy: RestartPolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
        environment: Mapping[str, str] | None = None,
        announce: Callable[[Mapping[str, Any]], None] = lambda _message: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._announce = announce
        self._limits: Limits = settings.limits()
        self._state = StateDirectory(settings.state_dir)
        self._notifier = Notifier(environment or {})
        self._events = EventLog()
        self._dirty = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_mode: StopMode | None = None
        self._stop_reason: str | None = None
        self._hold: Hold | None = None
        self._started_at = self._state_since = clock.now()
        self._shown_state = ""
        self._shown_link = ""
        self._announced_connected = False
        self._host = host or Host()
        self._inventory = Inventory(
            host=self._host,
            detector=detector or Detector(),
            limits=self._limits,
            clock=clock,
            on_event=self.on_event,
            on_change=self.on_change,
        )
        self._registry = WorkerRegistry(self._state.workers)
        self._books = Books(self._state, clock)
        self._workforce = Workforce(self._worker_setup(worker_command, policy), self._inventory, self)
        self._link = make_link(self._state.credential, self._describe, self._workforce.running, self, clock)
        self._server = LocalServer(
            settings.socket_path,
            hello={"server_version": __version__, "node": settings.name, "pid": os.getpid()},
            sections=self._sections,
            methods=self._methods(),
        )

    def _worker_setup(self, command: Sequence[str], policy: RestartPolicy | None) -> WorkerSetup:
        return WorkerSetup(
            command=command,
            listen_host=self._settings.host,
            logs=self._state.logs,
            mark=self._registry.mark,
            clock=self._clock,
            oom_kills=self._host.oom_kills,
            policy=policy or RestartPolicy(),
        )

    # The life of the process

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            SessionError: another supervisor uses the state directory or the socket.
            StoreError: the state directory or the socket cannot be created.
        """
        with self._state:
            self._recover()
            await self._server.start()
            try:
                await self._serve()
            finally:
                await self._server.close()
                self._books.close()
            self._registry.end()

    def _recover(self) -> None:
        ended = end_orphans(self._state.workers)
        if ended:
            self.on_event("warning", "supervisor", f"ended {ended} workers that a former supervisor left behind")
        self._registry.begin()
        self._hold = load_hold(self._state.hold, self._clock.now())
        self._link.set_accepting(self._hold is None)
        self._books.open()
        for unit in self._books.recent():
            self._link.claim(unit)

    async def _serve(self) -> None:
        self._announce({"event": "ready", "socket": str(self._settings.socket_path), "pid": os.getpid()})
        self._notifier.ready()
        tasks = [asyncio.create_task(self._stop.wait()), *map(asyncio.create_task, self._background())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self._end_workers(failed=tasks[0] not in done)
            await self._say_farewell(link_alive=tasks[1] not in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        coroutines = [self._run_link(), self._sample(), self._publish()]
        if self._notifier.watchdog_interval is not None:
            coroutines.append(self._feed_watchdog(self._notifier.watchdog_interval))
        return coroutines

    async def _run_link(self) -> None:
        """The hub hears of this node once its devices are known."""
        await self._inventory.detect()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._inventory.keep_up())
            group.create_task(self._link.run())

    async def _sample(self) -> None:
        while True:
            await self._clock.sleep_async(SAMPLE_SECONDS)
            self._inventory.refresh()
            if self._hold is not None and is_over(self._hold, self._clock.now()):
                self._set_hold(None, "the pause is over")
            self._guarded(self._books.save)
            self.on_change()

    async def _publish(self) -> None:
        """Tell who looks what changed, at most four times a second."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._note_state()
            self._server.publish()
            await self._clock.sleep_async(PUBLISH_SECONDS)

    async def _feed_watchdog(self, interval: float) -> None:
        while True:
            self._notifier.alive()
            await self._clock.sleep_async(interval)

    def stop(self, mode: StopMode, reason: str) -> None:
        """Ask `run` to end. A second call can only make it more urgent."""
        if self._stop_mode is not None and mode <= self._stop_mode:
            return
        self._stop_mode, self._stop_reason = mode, reason
        self._stop.set()
        if mode is StopMode.NOW:
            self._workforce.stop_all(reason)
        self.on_change()

    def stop_by_signal(self, name: str) -> None:
        """The first signal drains, the next one stops now."""
        mode = StopMode.DRAIN if self._stop_mode is None else StopMode.NOW
        self.stop(mode, f"the supervisor got {name}")

    def reload(self) -> None:
        """Read the configuration file again; a bad one changes nothing and is shown."""
        self._notifier.reloading(self._clock.monotonic())
        try:
            self._limits = self._settings.limits()
        except ConfigError as error:
            self.on_event("error", "config", f"not reloaded: {error}")
        else:
            self._inventory.set_limits(self._limits)
            self.on_event("info", "config", f"reloaded: {self._limits.cpu_workers} CPU workers")
        self._notifier.ready()
        self.on_change()

    async def _end_workers(self, *, failed: bool) -> None:
        self._notifier.stopping()
        self._link.set_accepting(False)
        if failed:
            self.stop(StopMode.NOW, "the supervisor failed")
        reason = self._stop_reason or "the supervisor is stopping"
        self.on_event("info", "supervisor", f"stopping: {reason}")
        if self._stop_mode is StopMode.DRAIN:
            self._workforce.drain_all(self._limits.drain_seconds, reason)
        else:
            self._workforce.stop_all(reason)
        await self._workforce.all_gone()

    async def _say_farewell(self, *, link_alive: bool) -> None:
        """Give the last claims and reports a moment to reach a hub that listens."""
        self._guarded(self._books.save)
        deadline = self._clock.monotonic() + FAREWELL_SECONDS
        while link_alive and self._link.status.state is LinkState.CONNECTED and self._clock.monotonic() < deadline:
            await self._clock.sleep_async(0.05)
            if not self._link.unanswered_claims:
                return

    # What the hub says

    def on_status(self, status: LinkStatus) -> None:
        if status.state is LinkState.CONNECTED and not self._announced_connected:
            self._announced_connected = True
            self._announce({"event": "connected", "node_id": status.node_id})
            self._warn_of_loopback(status.address)
        self._tell_link(status)
        self.on_change()

    def _tell_link(self, status: LinkStatus) -> None:
        if status.state is LinkState.CONNECTED:
            text = f"connected to {status.address}"
        elif status.error is not None:
            text = f"{status.state.value}: {status.error.message}; {status.error.fix}"
        else:
            return
        if text != self._shown_link:
            self._shown_link = text
            severity = "info" if status.state is LinkState.CONNECTED else "warning"
            self.on_event(severity, "hub", text)

    def _warn_of_loopback(self, hub: str) -> None:
        host = self._settings.host
        if is_loopback(host) and not is_loopback(hub):
            text = (
                f"peers on other machines cannot reach workers at {host}: start with --host and this machine's address"
            )
            self.on_event("warning", "supervisor", text)

    def on_assignment(self, assignment: Assignment) -> None:
        reason = self._refusal() or self._workforce.assign(assignment)
        if reason is not None:
            self.on_event("warning", "hub", f"refused rank {assignment.rank} of {assignment.job_name}: {reason}")
            self._link.report(
                WorkerChange(
                    job_id=assignment.job_id,
                    epoch=assignment.epoch,
                    rank=assignment.rank,
                    state=WorkerState.EXITED,
                    restarts=0,
                    reason=f"refused: {reason}",
                )
            )
        self.on_change()

    def _refusal(self) -> str | None:
        if self._stop_reason is not None:
            return self._stop_reason
        if self._hold is not None:
            return f"the owner asked for {self._hold.kind.value}"
        return None

    def on_topology(self, topology: Topology, certificates: Sequence[Certificate]) -> None:
        self._workforce.topology(topology, certificates)
        self.on_change()

    def on_release(self, job_id: JobId, epoch: Epoch, reason: str) -> None:
        if self._workforce.release(job_id, epoch, reason):
            self.on_event("info", "hub", f"job {job_id} (epoch {epoch}) released: {reason}")

    def on_earnings(self, earnings: Earnings) -> None:
        self._books.confirmed(earnings)
        self.on_change()

    # What the workers say

    def on_report(self, report: WorkerReady | WorkerChange) -> None:
        self._link.report(report)

    def on_claim(self, assignment: Assignment, claim: Claim) -> None:
        key = UnitKey(job_id=assignment.job_id, epoch=assignment.epoch, step=claim.step, rank=assignment.rank)
        unit = Unit(key=key, micro_batches=claim.micro_batches)
        self._guarded(lambda: self._books.claimed(unit))
        self._link.claim(unit)
        self._workforce.claimed(unit)
        self.on_change()

    def on_process(self, *, started: int | None = None, ended: int | None = None) -> None:
        if started is not None:
            self._guarded(lambda: self._registry.add(started))
        if ended is not None:
            self._guarded(lambda: self._registry.discard(ended))

    def on_event(self, severity: str, source: str, text: str) -> None:
        event = LoggedEvent(at=round(self._clock.now(), 3), severity=severity, source=source, text=text)
        shown = self._events.add(event)
        if shown is not None:
            log.log(_LOG_LEVELS[shown.severity], "%s: %s", shown.source, shown.text)
            self.on_change()

    def on_change(self) -> None:
        self._dirty.set()

    def _guarded(self, write: Callable[[], None]) -> None:
        """A full disk is shown and stops nothing: the work goes on, the hub has the books."""
        try:
            write()
        except StoreError as error:
            self.on_event("error", "supervisor", str(error))

    # What the owner says

    def _methods(self) -> dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        return {
            "pause": self._on_pause,
            "resume": self._on_resume,
            "drain": self._on_drain,
            "reset_breaker": self._on_reset_breaker,
        }

    def _on_pause(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        hold = parse_pause(params, self._clock.now())
        self._set_hold(hold, "paused by the owner")
        self._workforce.drain_all(PAUSE_DRAIN_SECONDS, "paused by the owner")
        return {"until": hold.until}

    def _on_drain(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        seconds = parse_drain(params, self._limits.drain_seconds)
        self._set_hold(Hold(kind=HoldKind.DRAIN), "drained by the owner")
        self._workforce.drain_all(seconds, "drained by the owner")
        return {"seconds": seconds}

    def _on_resume(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if params:
            raise RequestError(code="bad_params", message="resume takes no parameters")
        self._set_hold(None, "resumed by the owner")
        return {}

    def _on_reset_breaker(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        name = params.get("worker")
        if params.keys() - {"worker"} or not isinstance(name, str | None):
            raise RequestError(code="bad_params", message="reset_breaker takes {} or {'worker': id}")
        return {"reset": self._workforce.reset_breakers(name)}

    def _set_hold(self, hold: Hold | None, text: str) -> None:
        if hold == self._hold:
            return
        self._hold = hold
        self._guarded(lambda: save_hold(self._state.hold, hold))
        self._link.set_accepting(hold is None and self._stop_reason is None)
        self.on_event("info", "owner", text)

    # What others see

    def _describe(self) -> NodeInfo:
        return NodeInfo(
            name=self._settings.name,
            host=self._settings.host,
            version=__version__,
            devices=tuple(device.info() for device in self._inventory.devices),
        )

    def _picture(self) -> Picture:
        return Picture(
            name=self._settings.name,
            version=__version__,
            now=self._clock.now(),
            started_at=self._started_at,
            detected=self._inventory.detected,
            stopping=self._stop_reason,
            hold=self._hold,
            link=self._link.status,
            devices=self._inventory.devices,
            workers=tuple(worker.view() for worker in self._workforce.workers),
            jobs=self._workforce.jobs,
            earnings=self._books.earnings,
            earnings_at=self._books.confirmed_at,
            today_micro=self._books.today_micro,
            events=tuple(self._events),
        )

    def _note_state(self) -> str:
        state = node_state(self._picture()).value
        if state != self._shown_state:
            self._shown_state = state
            self._state_since = self._clock.now()
            self._notifier.status(state)
        return state

    def _sections(self) -> Sections:
        self._note_state()
        return build_sections(self._picture(), self._state_since)


_LOG_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
