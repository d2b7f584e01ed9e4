"""One run: a hub, nodes and trainers under the faults of a seed, watched at every event."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distensor.comm.bootstrap import fingerprint_of_pem
from distensor.comm.tokens import JoinToken, Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.parallel import ParallelConfig
from distensor.hub.machine import DEFAULT_PATIENCE
from distensor.testing.simulation.chaos import Chaos
from distensor.testing.simulation.checks import Checks
from distensor.testing.simulation.disk import Disk, MemoryDisk, SqliteDisk
from distensor.testing.simulation.faults import Fault, plan
from distensor.testing.simulation.hub import AUTHORITY, HubHost
from distensor.testing.simulation.loop import PartyClock, VirtualLoop
from distensor.testing.simulation.network import ADDRESS, HUB, Connection, Network, Odds
from distensor.testing.simulation.node import SimulatedNode
from distensor.testing.simulation.trace import Entry, Promise, Trace, ViolationError
from distensor.testing.simulation.trainer import SimulatedTrainer, Wishes

START = 1_700_000_000.0
LOOK_SECONDS = 0.5
OPEN_PATH = (0.002, 0.05)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of a run. Times are simulated seconds.

    `steps`: the run ends after so many events, None: when everything has settled. `faults`: only these of the seed's
    plan, None: all of them.
    """

    seed: int = 0
    nodes: int = 4
    slots: int = 2
    trainers: int = 2
    faulty: float = 120.0
    every: float = 4.0
    settle: float = 400.0
    steps: int | None = None
    faults: tuple[int, ...] | None = None
    sqlite: bool = False
    keep: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run was. `seconds` are simulated, `real` those of this machine."""

    settings: Settings
    violation: ViolationError | None
    digest: str
    steps: int
    seconds: float
    real: float
    faults: tuple[Fault, ...]
    counts: dict[str, int]
    entries: tuple[Entry, ...] = field(repr=False, default=())

    @property
    def command(self) -> str:
        """What repeats it."""
        words = ["python -m distensor.testing.simulation", f"--seed {self.settings.seed}", f"--steps {self.steps}"]
        default = Settings()
        for name in ("nodes", "slots", "trainers", "faulty", "every"):
            value = getattr(self.settings, name)
            words += [f"--{name} {value:g}"] if value != getattr(default, name) else []
        if self.settings.faults is not None:
            words.append("--faults " + (",".join(map(str, self.settings.faults)) or "none"))
        return " ".join([*words, *(["--sqlite"] if self.settings.sqlite else [])])


class _EnoughError(Exception):
    """So many events were wanted."""


def run(settings: Settings) -> Outcome:
    """Run a seed until it has settled, broken a promise, or had its number of events."""
    began = SYSTEM_CLOCK.monotonic()
    with tempfile.TemporaryDirectory(prefix="distensor-simulation-") as folder, _loop() as loop:
        world = World(settings, loop, Path(folder))
        loop.between = world.between
        try:
            loop.run_until_complete(world.live())
        except (_EnoughError, ViolationError):
            pass  # what there is to say about it the world knows
        finally:
            world.close()
        return world.outcome(SYSTEM_CLOCK.monotonic() - began)


@contextmanager
def _loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.finish()


class World:
    """All parties of one run. Each has dice of its own, so that one fault less leaves the others' throws alone."""

    def __init__(self, settings: Settings, loop: VirtualLoop, folder: Path) -> None:
        self.settings = settings
        self._loop = loop
        self._heard: dict[Connection, float] = {}
        self.trace = Trace(loop.time, keep=settings.keep)
        self.checks = Checks(self.trace, loop.time)
        self.network = Network(loop, self._dice("network"), self.trace)
        self.network.odds = Odds(lost=0.03, unanswered=0.06, repeated=0.03)
        self.network.heard = self._hub_heard
        self.plan = plan(self._dice("faults"), first=5.0, last=settings.faulty, every=settings.every)
        self.disk: Disk = SqliteDisk(folder) if settings.sqlite else MemoryDisk()
        self.faults_met: Counter[str] = Counter()
        self._make_parties(folder)
        loop.set_exception_handler(self._unhandled)

    def _dice(self, name: str) -> random.Random:
        return random.Random(f"{self.settings.seed} {name}")  # noqa: S311  # reproducible, not secret

    def _clock(self, name: str) -> PartyClock:
        dice = self._dice(f"{name} clock")
        return PartyClock(self._loop, wall=START + dice.uniform(-1e6, 1e6), since_boot=dice.uniform(0.0, 1e6))

    def _make_parties(self, folder: Path) -> None:
        nodes = [f"node-{number}" for number in range(self.settings.nodes)]
        trainers = [f"trainer-{number}" for number in range(self.settings.trainers)]
        tokens = {f"node-token-of-{name}": (Role.NODE, "node") for name in nodes}
        tokens |= {f"trainer-token-of-{name}": (Role.TRAINER, name) for name in trainers}
        self.hub = HubHost(
            disk=self.disk,
            network=self.network,
            clock=self._clock(HUB),
            dice=self._dice(HUB),
            checks=self.checks,
            trace=self.trace,
            tokens=tokens,
        )
        self.nodes = [self._make_node(name, folder) for name in nodes]
        self.trainers = [self._make_trainer(name) for name in trainers]

    def _make_node(self, name: str, folder: Path) -> SimulatedNode:
        token = JoinToken(
            address=ADDRESS,
            fingerprint=fingerprint_of_pem(AUTHORITY),
            role=Role.NODE,
            secret=f"node-token-of-{name}",
        )
        return SimulatedNode(
            name,
            token=token.encode(),
            folder=folder,
            slots=self.settings.slots,
            network=self.network,
            clock=self._clock(name),
            dice=self._dice(name),
            checks=self.checks,
            trace=self.trace,
        )

    def _make_trainer(self, name: str) -> SimulatedTrainer:
        wishes = Wishes(
            meshes=(
                ParallelConfig(data_parallel=2),
                ParallelConfig(data_parallel=2, pipeline_parallel=2),
                ParallelConfig(pipeline_parallel=2),
                ParallelConfig(data_parallel=3),
            ),
            steps=(4, 8, 16, 40),
        )
        return SimulatedTrainer(
            name,
            secret=f"trainer-token-of-{name}",
            wishes=wishes,
            network=self.network,
            dice=self._dice(name),
            checks=self.checks,
            trace=self.trace,
            peers={node.name: node for node in self.nodes},
        )

    # At every event

    def between(self) -> None:
        """Before each turn of the loop: whether to go on."""
        if self.checks.violation is not None:
            raise self.checks.violation
        if self.settings.steps is not None and self.trace.steps >= self.settings.steps:
            raise _EnoughError

    def _unhandled(self, _: Any, context: dict[str, Any]) -> None:
        self.checks.broken(Promise.DEFECT, f"{context.get('message')}: {context.get('exception')!r}")

    def _hub_heard(self, connection: Connection, message: Any) -> None:
        if message.HasField("heartbeat"):
            self._heard[connection] = self._loop.time()

    async def _look(self) -> None:
        """Whether the hub is right about who is there."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.hub.up:
                mesh = self.hub.machine.mesh(self.hub.clock.monotonic())
                self.checks.mesh(mesh, self._ages(), DEFAULT_PATIENCE.silence, writing=self.hub.writing)

    def _ages(self) -> dict[str, float | None]:
        """Seconds since the last heartbeat of each machine, on the one stream of it that the hub has open; None where
        it has none. A machine with a stream too young or one too many is left out."""
        ages: dict[str, float | None] = {}
        for node in self.nodes:
            streams = [one for one in self.network.connections(node.name) if one.served]
            if not streams:
                ages[node.name] = None
            elif len(streams) == 1 and streams[0] in self._heard:
                ages[node.name] = self._loop.time() - self._heard[streams[0]]
        return ages

    # The run

    async def live(self) -> None:
        self.hub.start()
        for node in self.nodes:
            node.start()
        for trainer in self.trainers:
            trainer.start()
        tasks = [self._loop.create_task(self._look())]
        chaos = Chaos(self.hub, self.nodes, self.trainers, self.network, self.checks, self.trace)
        tasks += [self._loop.create_task(chaos.meet(fault)) for fault in self._wanted()]
        await asyncio.sleep(self.settings.faulty)
        await asyncio.gather(*tasks[1:])
        self.faults_met = chaos.met
        self._heal()
        await self._settle()
        tasks[0].cancel()

    def _wanted(self) -> list[Fault]:
        only = self.settings.faults
        return [fault for fault in self.plan if only is None or fault.number in only]

    def _heal(self) -> None:
        self.trace.note("world", "no more faults")
        self.network.odds = Odds()
        for path in self.network.paths:
            path.low, path.high = OPEN_PATH
            path.heal()
        self.hub.set_full(False)
        if not self.hub.up:
            self.hub.start()
        self.hub.store.dies = None
        for node in self.nodes:
            node.start()
        for trainer in self.trainers:
            trainer.enough = True

    async def _settle(self) -> None:
        deadline = self._loop.time() + self.settings.settle
        while outstanding := self._outstanding():
            if self._loop.time() >= deadline:
                text = f"after {self.settings.settle:g} s without faults: {'; '.join(outstanding)}"
                self.checks.broken(Promise.LIVE, text)
                break
            await asyncio.sleep(1.0)
        self.checks.settled_units()
        self.hub.audit()
        await asyncio.sleep(0)

    def _outstanding(self) -> list[str]:
        found = [f"{node.name} is not connected" for node in self.nodes if not node.connected]
        found += [f"{node.name} has {len(node.workers)} workers" for node in self.nodes if node.workers]
        found += [f"{node.name} has {node.unanswered} claims unanswered" for node in self.nodes if node.unanswered]
        found += [f"{trainer.name} is busy" for trainer in self.trainers if trainer.busy]
        found += [f"job {job.job_id} is {job.state.value}" for job in self.checks.live_jobs()]
        free = self.hub.machine.mesh(self.hub.clock.monotonic()).available_workers
        slots = self.settings.slots * len(self.nodes)
        return found + ([] if free == slots else [f"{free} of {slots} slots are free"])

    def close(self) -> None:
        self.disk.close()

    def outcome(self, real: float) -> Outcome:
        counts: Counter[str] = Counter(dict(sorted(self.faults_met.items())))
        counts.update(self.checks.counts)
        counts["jobs"] = len(self.checks.jobs)
        counts["steps"] = sum(trainer.steps for trainer in self.trainers)
        return Outcome(
            settings=self.settings,
            violation=self.checks.violation,
            digest=self.trace.digest,
            steps=self.trace.steps,
            seconds=self._loop.time(),
            real=real,
            faults=tuple(self._wanted()),
            counts=dict(counts),
            entries=tuple(self.trace.entries),
        )
