"""Faults as they happen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from distensor.core.control import Unit, UnitKey
from distensor.core.ids import Rank
from distensor.testing.simulation.checks import Checks
from distensor.testing.simulation.faults import Fault, FaultKind
from distensor.testing.simulation.hub import HubHost
from distensor.testing.simulation.network import HUB, Network
from distensor.testing.simulation.node import SimulatedNode
from distensor.testing.simulation.trace import Trace
from distensor.testing.simulation.trainer import SimulatedTrainer

T = TypeVar("T")


class Chaos:
    """Does to the parties what a plan says. `met`: how many faults of each kind were done."""

    def __init__(
        self,
        hub: HubHost,
        nodes: Sequence[SimulatedNode],
        trainers: Sequence[SimulatedTrainer],
        network: Network,
        checks: Checks,
        trace: Trace,
    ) -> None:
        self._hub = hub
        self._nodes = nodes
        self._trainers = trainers
        self._network = network
        self._checks = checks
        self._trace = trace
        self.met: Counter[str] = Counter()
        self._do: dict[FaultKind, Callable[[Fault], Awaitable[None]]] = {
            FaultKind.HUB_KILL: self._hub_kill,
            FaultKind.HUB_POWER: self._hub_kill,
            FaultKind.HUB_KILL_IN_COMMIT: self._hub_kill_in_commit,
            FaultKind.HUB_STOP: self._hub_stop,
            FaultKind.DISK_FULL: self._disk_full,
            FaultKind.HUB_CLOCK: self._hub_clock,
            FaultKind.NODE_KILL: self._node_kill,
            FaultKind.NODE_POWER: self._node_kill,
            FaultKind.NODE_CLOCK: self._node_clock,
            FaultKind.WORKER_KILL: self._worker_kill,
            FaultKind.TRAINER_KILL: self._trainer_kill,
            FaultKind.TRAINER_POWER: self._trainer_kill,
            FaultKind.CUT_NODE: self._cut_node,
            FaultKind.CUT_TRAINER: self._cut_trainer,
            FaultKind.CUT_PEERS: self._cut_peers,
            FaultKind.SLOW: self._slow,
            FaultKind.RESET: self._reset,
            FaultKind.THEFT: self._theft,
        }

    async def meet(self, fault: Fault) -> None:
        """Wait for its moment, do it, and undo it where it passes."""
        await asyncio.sleep(fault.at)
        self._trace.note("world", str(fault))
        self.met[fault.kind.value] += 1
        await self._do[fault.kind](fault)

    def _node(self, fault: Fault) -> SimulatedNode:
        return _chosen(self._nodes, fault.draw)

    def _trainer(self, fault: Fault) -> SimulatedTrainer:
        return _chosen(self._trainers, fault.draw)

    # The hub

    async def _hub_kill(self, fault: Fault) -> None:
        self._hub.kill(quiet=fault.kind is FaultKind.HUB_POWER)
        await self._hub_again(fault)

    async def _hub_kill_in_commit(self, fault: Fault) -> None:
        self._hub.kill_in_commit()
        await self._hub.down()
        await self._hub_again(fault)

    async def _hub_stop(self, fault: Fault) -> None:
        await self._hub.stop()
        await self._hub_again(fault)

    async def _hub_again(self, fault: Fault) -> None:
        await asyncio.sleep(fault.seconds)
        if not self._hub.up:
            self._hub.start()

    async def _disk_full(self, fault: Fault) -> None:
        self._hub.set_full(True)
        await asyncio.sleep(fault.seconds)
        self._hub.set_full(False)

    async def _hub_clock(self, fault: Fault) -> None:
        self._hub.clock.jump_wall(fault.size)

    # Nodes and trainers

    async def _node_kill(self, fault: Fault) -> None:
        node = self._node(fault)
        node.kill(quiet=fault.kind is FaultKind.NODE_POWER)
        await asyncio.sleep(fault.seconds)
        node.start()

    async def _node_clock(self, fault: Fault) -> None:
        self._node(fault).clock.jump_wall(fault.size)

    async def _worker_kill(self, fault: Fault) -> None:
        workers = [(node, worker) for node in self._nodes for worker in node.workers.values()]
        if workers:
            node, worker = _chosen(workers, fault.draw)
            node.crash_worker(worker)

    async def _trainer_kill(self, fault: Fault) -> None:
        trainer = self._trainer(fault)
        trainer.kill(quiet=fault.kind is FaultKind.TRAINER_POWER)
        await asyncio.sleep(fault.seconds)
        trainer.start()

    async def _theft(self, fault: Fault) -> None:
        thief = self._trainer(fault)
        foreign = [job for job in self._checks.jobs.values() if job.owner != thief.name]
        if foreign and thief.alive:
            job = _chosen(foreign, fault.draw)
            key = UnitKey(job_id=job.job_id, epoch=job.epoch, step=1, rank=Rank(0))
            await thief.steal([Unit(key=key, micro_batches=1)])

    # The network

    async def _cut_node(self, fault: Fault) -> None:
        await self._cut(self._node(fault).name, HUB, fault.seconds)

    async def _cut_trainer(self, fault: Fault) -> None:
        await self._cut(self._trainer(fault).name, HUB, fault.seconds)

    async def _cut_peers(self, fault: Fault) -> None:
        pairs = [(node.name, trainer.name) for node in self._nodes for trainer in self._trainers]
        await self._cut(*_chosen(pairs, fault.draw), fault.seconds)

    async def _cut(self, one: str, other: str, seconds: float) -> None:
        self._network.cut(one, other)
        await asyncio.sleep(seconds)
        self._network.path(one, other).heal()

    async def _slow(self, fault: Fault) -> None:
        path = _chosen(self._network.paths, fault.draw)
        before = (path.low, path.high)
        path.low, path.high = fault.size / 10, fault.size
        await asyncio.sleep(fault.seconds)
        path.low, path.high = before

    async def _reset(self, fault: Fault) -> None:
        """Some router forgets who was connected: half of all streams break."""
        for number, connection in enumerate(self._network.connections()):
            if (number + int(fault.draw * 100)) % 2:
                connection.reset()


def _chosen(things: Sequence[T], draw: float) -> T:
    return things[int(draw * len(things))]
