"""The hub's wall clock jumps by days, while it runs and while it is down: nothing that counts notices."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hub_kit import HubProcess, WordNode, spec, until

from distensor.comm import HubClient, new_key_and_csr
from distensor.core.control import Assignment, Certificate, JobState, JobUpdate, Unit, UnitKey, WorkerReady
from distensor.core.ids import DRIVER_RANK, JobId, Rank
from distensor.transport.identity import client_context, peer_identity, server_context
from distensor.transport.types import Credentials

DAY = 86_400.0


@dataclass
class KeyNode(WordNode):
    """One whose workers keep the keys of their certificates."""

    keys: dict[tuple[JobId, Rank], bytes] = field(default_factory=dict)

    def on_assignment(self, assignment: Assignment) -> None:
        job_id, epoch, rank = assignment.job_id, assignment.epoch, assignment.rank
        self.held.add((job_id, epoch, rank))
        self.keys[job_id, rank], csr = new_key_and_csr(job_id, epoch, rank)
        self.link.report(WorkerReady(job_id=job_id, epoch=epoch, rank=rank, port=40_000 + rank, csr_pem=csr))

    def credentials(self, job_id: JobId) -> dict[Rank, Credentials]:
        """Of the ranks of a job that has begun."""
        return {
            each.rank: papers(self.keys[job_id, each.rank], each)
            for topology, certificates in self.topologies
            if topology.job_id == job_id
            for each in certificates
        }


def papers(key: bytes, certificate: Certificate) -> Credentials:
    return Credentials(
        key_pem=key, certificate_pem=certificate.certificate_pem, authority_pem=certificate.authority_pem
    )


class Clock:
    """The hub's."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0)

    def set(self, seconds: float) -> None:
        self.file.with_suffix(".new").write_text(str(seconds))
        self.file.with_suffix(".new").replace(self.file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "offset")


@pytest.fixture
def hub(tmp_path: Path, clock: Clock) -> Iterator[list[HubProcess]]:
    """The last one runs; a test that starts it again adds to the list."""
    processes = [HubProcess(tmp_path / "state", tokens=2, clock_file=clock.file)]
    yield processes
    processes[-1].stop()


@asynccontextmanager
async def linked(*nodes: WordNode) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(node.link.run()) for node in nodes]
    try:
        await until(lambda: all(node.connected for node in nodes), what="nodes connected")
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def begun(client: HubClient, job_id: JobId) -> JobUpdate:
    """The first update of a job that is no longer being placed."""
    return next(update for update in client.watch_job(job_id) if update.state is not JobState.PLACED)


def meet(ours: Credentials, theirs: Credentials) -> tuple[Rank, Rank]:
    """Who sees whom when two members connect."""
    one, other = socket.socketpair()
    ends: list[ssl.SSLSocket] = []
    server = threading.Thread(
        target=lambda: ends.append(server_context(theirs).wrap_socket(other, server_side=True)), daemon=True
    )
    server.start()
    with client_context(ours).wrap_socket(one) as client:
        server.join(10)
        with ends[0]:
            return peer_identity(client).rank, peer_identity(ends[0]).rank


async def run_a_job(client: HubClient, nodes: tuple[KeyNode, KeyNode], name: str) -> tuple[JobId, JobUpdate]:
    """One rank on each node, and the trainer: all of them accept each other's certificates."""
    key, csr = new_key_and_csr(JobId("new"), None, DRIVER_RANK)
    job_id, _ = await asyncio.to_thread(client.submit_job, spec(2, submission=name, name=name, csr=csr))
    update = await asyncio.to_thread(begun, client, job_id)
    assert update.state is JobState.RUNNING, update.reason
    assert update.certificate is not None

    def credentials() -> dict[Rank, Credentials]:
        return {rank: each for node in nodes for rank, each in node.credentials(job_id).items()}

    await until(lambda: sorted(credentials()) == [0, 1], what="certificates of both ranks")
    found = credentials()
    driver = papers(key, update.certificate)
    assert meet(found[Rank(0)], found[Rank(1)]) == (1, 0)
    assert meet(driver, found[Rank(1)]) == (1, DRIVER_RANK)
    return job_id, update


@pytest.mark.asyncio
async def test_a_clock_that_jumps_by_days_loses_no_node_and_no_job(
    hub: list[HubProcess], clock: Clock, tmp_path: Path
) -> None:
    tokens = hub[0].ready["node_tokens"]
    nodes = tuple(KeyNode(f"atlas-{i}", tokens[i], tmp_path / f"n{i}.json", slots=8) for i in range(2))
    assert len(nodes) == 2
    with HubClient(hub[0].ready["trainer_token"]) as client:
        async with linked(*nodes):
            first, update = await run_a_job(client, nodes, "first")
            for number, jump in enumerate((DAY, -DAY, 400 * DAY)):
                clock.set(jump)
                beats = [len(node.statuses) for node in nodes]
                await run_a_job(client, nodes, f"after-{number}")
                await until(lambda seen=beats: all(len(n.statuses) > s for n, s in zip(nodes, seen, strict=True)))  # type: ignore[misc]
            mesh = await asyncio.to_thread(client.query_mesh)
            assert [node.connected for node in mesh.nodes] == [True, True]

            # Down, and up again with a clock of the past: what was promised before still holds.
            clock.set(-30 * DAY)
            hub[-1].kill()
            hub.append(hub[-1].restart())
            assert hub[-1].ready["generation"] == hub[0].ready["generation"] + 1
            await until(lambda: all(n.link.status.generation == hub[-1].ready["generation"] for n in nodes))
            again = await asyncio.to_thread(lambda: next(iter(client.watch_job(first))))
            assert (again.state, again.epoch, again.certificate) == (JobState.RUNNING, update.epoch, update.certificate)
            key = UnitKey(job_id=first, epoch=update.epoch, step=1, rank=Rank(0))
            await asyncio.to_thread(client.report_units, [Unit(key=key, micro_batches=2)])
            await run_a_job(client, nodes, "after-the-restart")
            assert not any(node.releases for node in nodes), "no membership was given up"
