"""A hub's state machine with two nodes, and words to ask what it said."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from hub_kit import info, spec

from distensor.comm.messages import Heartbeat, JobRef, Register
from distensor.core.control import (
    JobSpec,
    JobUpdate,
    Mesh,
    WorkerChange,
    WorkerReady,
    WorkerState,
)
from distensor.core.errors import (
    HubProtocolError,
)
from distensor.core.ids import Epoch, Generation, JobId, NodeId, Rank
from distensor.hub.effects import Effect, Publish, Send, SessionId
from distensor.hub.machine import HubMachine, Patience
from distensor.hub.records import JobRecord, NodeRecord

A, B = NodeId("n_a"), NodeId("n_b")
NAMES = {A: "atlas-1", B: "atlas-2"}


class FakeSigner:
    authority_pem = "authority"

    def sign(self, csr_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        if csr_pem == "bad":
            raise HubProtocolError("no certificate request")
        return f"signed {csr_pem} for {job_id}/{epoch}/{rank}"

    def sign_anew(self, certificate_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        assert certificate_pem == f"signed {certificate_pem.split()[1]} for {job_id}/{epoch}/{rank}"
        return f"{certificate_pem} anew"


class Hub:
    """A machine with two nodes, and what it said, by what kind it is."""

    def __init__(self, jobs: Iterable[JobRecord] = (), now: float = 0.0, relay: str = "") -> None:
        self.now = now
        self.jobs = tuple(jobs)
        self.sessions = itertools.count(1)
        ids = itertools.count(1)
        self.machine = HubMachine(
            generation=Generation(7),
            nodes=[
                NodeRecord(node_id=node_id, secret_hash="h", info=replace(info(name), node_id=node_id))
                for node_id, name in NAMES.items()
            ],
            jobs=self.jobs,
            submissions={(job.owner, job.submission): (job.job_id, job.epoch) for job in self.jobs},
            earnings={},
            signer=FakeSigner(),
            new_job_id=lambda: JobId(f"j_{next(ids)}"),
            patience=Patience(),
            now=now,
            relay=relay,
        )

    def join(self, node_id: NodeId, *running: JobRef, slots: int = 2) -> tuple[SessionId, list[Effect]]:
        session = SessionId(next(self.sessions))
        register = Register(info=info(NAMES[node_id], slots), running=running)
        return session, self.machine.join(session, node_id, register, self.now)

    def beat(self, session: SessionId, **more: bool) -> list[Effect]:
        return self.machine.beat(session, Heartbeat(sequence=1, **more), self.now, 0.0)  # type: ignore[arg-type]

    def connect(self, node_id: NodeId, *running: JobRef) -> SessionId:
        session, _ = self.join(node_id, *running)
        self.beat(session)
        return session

    def submit(self, job: JobSpec) -> tuple[JobId, Epoch, list[Effect]]:
        return self.machine.submit("main", job, self.now)

    def mesh(self) -> Mesh:
        return self.machine.mesh(self.now)

    def tick(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.machine.tick(self.now)


def sent(effects: Iterable[Effect], kind: type) -> list[tuple[SessionId, object]]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [(send.session, send.message) for send in sends if isinstance(send.message, kind)]


def updates(effects: Iterable[Effect]) -> list[JobUpdate]:
    return [effect.update for effect in effects if isinstance(effect, Publish)]


def ready(job_id: JobId, rank: int, *, epoch: int = 1, csr: str = "csr", port: int = 0) -> WorkerReady:
    return WorkerReady(job_id=job_id, epoch=Epoch(epoch), rank=Rank(rank), port=port or 4000 + rank, csr_pem=csr)


def change(job_id: JobId, rank: int, state: WorkerState, *, epoch: int = 1, reason: str = "") -> WorkerChange:
    return WorkerChange(job_id=job_id, epoch=Epoch(epoch), rank=Rank(rank), state=state, restarts=0, reason=reason)


def connected(mesh: Mesh) -> dict[str, bool]:
    return {node.info.name: node.connected for node in mesh.nodes}


def running_job(hub: Hub) -> tuple[JobId, SessionId, SessionId]:
    first, second = hub.connect(A), hub.connect(B)
    job_id, _, _ = hub.submit(spec(2, 2, csr="driver"))
    for rank, session in enumerate((first, first, second, second)):
        hub.machine.worker_ready(session, ready(job_id, rank))
    return job_id, first, second
