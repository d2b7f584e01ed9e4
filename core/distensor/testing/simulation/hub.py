"""The hub in the simulation: the real service, machine and books; started, killed at any point, started again."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from typing import Any

from distensor.comm.server import Servicer
from distensor.comm.tokens import Role
from distensor.core.ids import AccountId, Epoch, JobId, NodeId, Rank
from distensor.hub import access
from distensor.hub.accounts import MAIN
from distensor.hub.hashing import hash_secret
from distensor.hub.machine import DEFAULT_PATIENCE, HubMachine
from distensor.hub.repository import Snapshot
from distensor.hub.service import HubService, Mint
from distensor.testing.simulation.checks import Checks, certificate_of
from distensor.testing.simulation.disk import DiedError, Disk, SimulatedWriter, WatchedStore
from distensor.testing.simulation.loop import PartyClock
from distensor.testing.simulation.network import HUB, Network
from distensor.testing.simulation.trace import Promise, Trace

AUTHORITY = "-----BEGIN CERTIFICATE-----\nc2ltdWxhdGVk\n-----END CERTIFICATE-----\n"
"""Certificates are words here; this one only has the form of one."""


class WordSigner:
    """An authority whose certificates say what they are for, and when they were signed."""

    authority_pem = AUTHORITY

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def sign(self, csr_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        return f"{certificate_of(job_id, epoch, rank)}number {next(self._numbers)}"

    def sign_anew(self, certificate_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        return self.sign("", job_id, epoch, rank)


def _account(role: Role, subject: str) -> AccountId:
    """Each trainer has an account of its own."""
    return AccountId(subject) if role is Role.TRAINER else MAIN


class Names:
    """New names and secrets, in order. What has been given is never given again."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def node_id(self) -> NodeId:
        return NodeId(f"n_{next(self._numbers)}")

    def job_id(self) -> JobId:
        return JobId(f"j_{next(self._numbers)}")

    def secret(self) -> str:
        return f"secret-{next(self._numbers):012}"


class HubHost:
    """The machine that hubs run on, one after the other. `tokens`: secrets of join tokens, with role and subject."""

    def __init__(
        self,
        *,
        disk: Disk,
        network: Network,
        clock: PartyClock,
        dice: random.Random,
        checks: Checks,
        trace: Trace,
        tokens: dict[str, tuple[Role, str]],
    ) -> None:
        self.clock = clock
        self.machine: HubMachine
        self.servicer: Servicer
        self.store: WatchedStore
        self._disk = disk
        self._network = network
        self._dice = dice
        self._checks = checks
        self._trace = trace
        self._tokens = tokens
        self._names = Names()
        self._signer = WordSigner()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._service: HubService
        self._writer: SimulatedWriter
        self._down = asyncio.Event()
        self.full = False
        self.log: list[str] = []

    @property
    def up(self) -> bool:
        return self._network.host is self

    @property
    def writing(self) -> bool:
        return not self._writer.idle

    def start(self) -> None:
        """As `app.run_hub` does it, with what this world has in the place of files and sockets."""
        self.clock.reboot(self._dice.uniform(0.0, 1e6))
        self.store = WatchedStore(self._disk.open(), self._checks.committed)
        with self.store.transaction() as books:
            generation, snapshot = books.begin_generation(), books.snapshot()
            for secret, (role, subject) in self._tokens.items():
                if books.find_token(hash_secret(secret)) is None:
                    books.save_token(access.token_for(secret, role, subject, _account(role, subject)))
            self._checks.restarted(books)
        self._answered()
        self.store.full = self.full
        self._compose(generation, snapshot)
        self._network.host = self
        self._network.machine_up = True
        self._trace.note(HUB, f"starts, generation {generation}, {len(snapshot.jobs)} jobs")

    def _compose(self, generation: Any, snapshot: Snapshot) -> None:
        self.machine = HubMachine(
            generation=generation,
            nodes=snapshot.nodes,
            jobs=snapshot.jobs,
            submissions=snapshot.submissions,
            earnings=snapshot.earnings,
            signer=self._signer,
            new_job_id=self._names.job_id,
            patience=DEFAULT_PATIENCE,
            now=self.clock.monotonic(),
        )
        self._writer = SimulatedWriter(
            self.store,
            self._dice,
            wrote=lambda works: self._trace.note(HUB, f"commits {works}"),
            answered=self._answered,
            died=lambda: self.kill(quiet=False),
        )
        mint = Mint(node_id=self._names.node_id, secret=self._names.secret)
        self._service = HubService(self.machine, self._writer, self.clock, mint, self.log.append)
        self.servicer = Servicer(self._service)
        self.spawn(self._service.run())

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._checks.broken(Promise.DEFECT, f"the hub raised {error!r}")

    def kill(self, *, quiet: bool) -> None:
        """SIGKILL, or with `quiet` the power of its machine: nobody says goodbye."""
        if not self.up:
            return
        self._trace.note(HUB, "dies quietly" if quiet else "is killed")
        self._go(quiet=quiet)

    def _answered(self) -> None:
        self._disk.acknowledge()
        self._checks.answered()

    async def down(self) -> None:
        """Return once no hub is up."""
        while self.up:
            self._down.clear()
            await self._down.wait()

    def kill_in_commit(self) -> None:
        """Power fails when the next transaction is written and not committed."""

        def die() -> None:
            self._disk.freeze(self._dice)
            raise DiedError

        if self.up:
            self.store.dies = die

    async def stop(self) -> None:
        """As `distensor hub` ends on SIGTERM: nodes are told, what is queued is written."""
        if not self.up:
            return
        self._trace.note(HUB, "stops")
        self._service.stop()
        self._network.host = None
        await asyncio.sleep(0.5)
        for _ in range(20):
            if self._writer.idle:
                break
            await asyncio.sleep(0.05)
        if not self._writer.dead:
            self._go(quiet=False)

    def _go(self, *, quiet: bool) -> None:
        self._writer.dead = True
        self._down.set()
        self._network.host = None
        self._network.machine_up = not quiet
        for task in list(self._tasks):
            task.remove_done_callback(self._over)
            task.cancel()
        self._tasks.clear()
        for connection in self._network.connections():
            connection.lose_server(quiet=quiet)
        self._checks.crashed(kept=self._disk.crash(self._dice))

    def set_full(self, full: bool) -> None:
        """Whether the disk has no room for a commit."""
        self.full = full
        if self.up:
            self.store.full = full

    def audit(self) -> None:
        """The books of now against what was ever committed."""
        with self.store.transaction() as books:
            self._checks.restarted(books)
