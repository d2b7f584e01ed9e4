"""The supervisor: the life of the process around one `Node`, from the lock on its directory to its last worker."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import IntEnum
from typing import Any

from distensor import __version__
from distensor.comm import LinkState
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.errors import ConfigError
from distensor_server.benchmarks import Benchmarks
from distensor_server.breakers import Breakers
from distensor_server.config import Settings, make_limits
from distensor_server.devices.detect import Detector
from distensor_server.devices.host import Host
from distensor_server.gates.feature import Gates
from distensor_server.gates.settings import describe_changes
from distensor_server.guard import Guard
from distensor_server.hublink import LinkFactory
from distensor_server.income.feature import Income
from distensor_server.lifecycle import RestartPolicy
from distensor_server.localserver import LocalServer
from distensor_server.logtail import LogTail
from distensor_server.metricspage import MetricsPage
from distensor_server.node import FeatureFactory, Machine, Node
from distensor_server.nodestate import status_line
from distensor_server.notify import Notifier
from distensor_server.orphans import end_orphans
from distensor_server.owner import OwnersWish
from distensor_server.ownlog import OwnLog
from distensor_server.ports.feature import OpenPorts
from distensor_server.snapshot import SnapshotFile
from distensor_server.surroundings.surroundings import Surroundings
from distensor_server.updates import UpdateCheck
from distensor_server.wakefulness import Wakefulness

WORKER_COMMAND: Sequence[str] = (sys.executable, "-m", "distensor.node")
FEATURES: Sequence[FeatureFactory] = (
    OwnLog,
    Wakefulness,
    OwnersWish,
    Gates,
    Breakers,
    Guard,
    MetricsPage,
    UpdateCheck,
    OpenPorts,
    LogTail,
    Income,
    Benchmarks,
)
"""What every supervisor has, in the order in which refusals and gates are asked."""
SAMPLE_SECONDS = 2.0
PUBLISH_SECONDS = 0.25
FAREWELL_SECONDS = 1.5
STUCK_SECONDS = 10.0


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
        features: Sequence[FeatureFactory] = FEATURES,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._announce = announce
        self._notifier = Notifier(environment or {})
        self._dirty = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_mode: StopMode | None = None
        machine = Machine(
            clock=clock,
            make_link=make_link,
            worker_command=worker_command,
            detector=detector or Detector(),
            host=host or Host(),
            policy=policy or RestartPolicy(),
            environment=environment or {},
            surroundings=surroundings or Surroundings(),
        )
        self.node = Node(
            settings, machine, features=features, on_change=self._dirty.set, on_connected=self._on_connected
        )
        self._snapshot = SnapshotFile(self.node.state.snapshot, clock)
        self._ticked_at = clock.monotonic()
        self._server = LocalServer(
            settings.socket_path,
            hello={"server_version": __version__, "node": settings.name, "pid": os.getpid()},
            sections=self.node.sections,
            methods=self.node.features.all_methods(),
        )

    def _on_connected(self, node_id: str | None) -> None:
        self._announce({"event": "connected", "node_id": node_id})

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            SessionError: another supervisor uses the state directory or the socket.
            StoreError: the state directory or the socket cannot be created.
        """
        with self.node.state:
            self._recover()
            await self._server.start()
            try:
                await self._serve()
            finally:
                await self._server.close()
                self.node.journal.guarded(lambda: self._snapshot.write(self.node.sections()))
                self.node.features.tell("close", lambda feature: feature.close())
                self.node.books.close()
            self.node.registry.end()

    def _recover(self) -> None:
        node = self.node
        for path in node.state.set_aside_damaged():
            node.journal.add("warning", "supervisor", f"{path} was damaged: kept as {path.name}.damaged, begun anew")
        self._end_former_life()
        node.journal.guarded(node.registry.begin)
        node.books.open()
        node.features.open()
        node.reconsider()

    def _end_former_life(self) -> None:
        orphans = end_orphans(self.node.state.workers)
        if orphans.ended:
            text = f"ended {orphans.ended} workers that a former supervisor left behind"
            self.node.journal.add("warning", "supervisor", text)
        if orphans.stuck:
            pids = ", ".join(map(str, orphans.stuck))
            text = f"workers of a former supervisor do not end, not even by SIGKILL: {pids}; their devices may be stuck"
            self.node.journal.add("error", "supervisor", text)

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
        """The link comes first: `_serve` asks whether it is still alive."""
        coroutines = [self._run_link(), self._sample(), self._publish()]
        if self._notifier.watchdog_interval is not None:
            coroutines.append(self._feed_watchdog(self._notifier.watchdog_interval))
        return [*coroutines, self.node.features.background(self._clock)]

    async def _run_link(self) -> None:
        """The hub hears of this node once its devices are known."""
        await self.node.inventory.detect()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.node.inventory.keep_up())
            group.create_task(self.node.link.run())

    async def _sample(self) -> None:
        while True:
            await self._clock.sleep_async(SAMPLE_SECONDS)
            self.tick()

    def tick(self) -> None:
        """Read the machine and let every feature look."""
        self.node.inventory.refresh()
        picture = self.node.picture()
        self.node.features.tell("on_tick", lambda feature: feature.on_tick(picture))
        self.node.journal.flush()
        self.node.journal.guarded(self.node.books.save)
        self.node.journal.guarded(lambda: self._snapshot.keep(self.node.sections))
        self._ticked_at = self._clock.monotonic()
        self.node.on_change()

    async def _publish(self) -> None:
        """Tell who looks what changed, at most four times a second."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._notifier.status(status_line(self.node.note_state()))
            self._server.publish()
            await self._clock.sleep_async(PUBLISH_SECONDS)

    async def _feed_watchdog(self, interval: float) -> None:
        """A loop that is blocked sends nothing, and neither does one whose tick does not come any more."""
        while True:
            if self._clock.monotonic() - self._ticked_at < STUCK_SECONDS:
                self._notifier.alive()
            await self._clock.sleep_async(interval)

    def stop(self, mode: StopMode, reason: str) -> None:
        """Ask `run` to end. A second call can only make it more urgent."""
        if self._stop_mode is not None and mode <= self._stop_mode:
            return
        self._stop_mode, self.node.stopping = mode, reason
        self._stop.set()
        if mode is StopMode.NOW:
            self.node.workforce.stop_all(reason)
        self.node.on_change()

    def stop_by_signal(self, name: str) -> None:
        """The first signal drains, the next one stops now."""
        mode = StopMode.DRAIN if self._stop_mode is None else StopMode.NOW
        self.stop(mode, f"the supervisor got {name}")

    def reload(self) -> None:
        """Read the configuration file again; a bad one changes nothing and is shown."""
        self._notifier.reloading(self._clock.monotonic())
        try:
            layers = self._settings.layers()
            limits = make_limits(layers)
        except ConfigError as error:
            self.node.journal.add("error", "config", f"not reloaded: {error}")
        else:
            changes = describe_changes(self.node.limits, limits)
            self.node.set_limits(limits, layers)
            self.node.journal.add("info", "config", f"reloaded: {changes}")
        self._notifier.ready()
        self.node.on_change()

    async def _end_workers(self, *, failed: bool) -> None:
        self._notifier.stopping(self._longest_end())
        self.node.link.set_accepting(False)
        if failed:
            self.stop(StopMode.NOW, "the supervisor failed")
        reason = self.node.stopping or "the supervisor is stopping"
        self.node.journal.add("info", "supervisor", f"stopping: {reason}")
        if self._stop_mode is StopMode.DRAIN:
            self.node.workforce.drain_all(self.node.limits.drain_seconds, reason)
        else:
            self.node.workforce.stop_all(reason)
        await self.node.workforce.all_gone()

    def _longest_end(self) -> float:
        """Seconds that the end may take at most, with some to spare."""
        drain = self.node.limits.drain_seconds if self._stop_mode is StopMode.DRAIN else 0.0
        return drain + 2 * self.node.workforce.policy.stop_grace + FAREWELL_SECONDS + 10.0

    async def _say_farewell(self, *, link_alive: bool) -> None:
        """Give the last claims and reports a moment to reach a hub that listens."""
        link = self.node.link
        self.node.journal.guarded(self.node.books.save)
        deadline = self._clock.monotonic() + FAREWELL_SECONDS
        while link_alive and link.status.state is LinkState.CONNECTED and self._clock.monotonic() < deadline:
            await self._clock.sleep_async(0.05)
            if not link.unanswered_claims:
                return
