"""A real hub process with real links: the whole control plane of one job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hub_kit import HubProcess, WordNode, spec, until

from distensor.comm import HubClient
from distensor.core.control import JobState, JobUpdate, Unit, UnitKey
from distensor.core.ids import JobId, Rank


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    process = HubProcess(tmp_path / "state", tokens=2)
    yield process
    assert process.stop() == 0


@asynccontextmanager
async def linked(*nodes: WordNode) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(node.link.run()) for node in nodes]
    try:
        await until(lambda: all(node.connected for node in nodes), what="nodes connected")
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


def two_nodes(hub: HubProcess, tmp_path: Path) -> tuple[WordNode, WordNode]:
    tokens = hub.ready["node_tokens"]
    first = WordNode("atlas-1", tokens[0], tmp_path / "n1.json")
    return first, WordNode("atlas-2", tokens[1], tmp_path / "n2.json")


@pytest.mark.asyncio
async def test_one_job_from_submission_to_earnings(hub: HubProcess, tmp_path: Path) -> None:
    first, second = two_nodes(hub, tmp_path)
    with HubClient(hub.ready["trainer_token"]) as client:
        async with linked(first, second):
            mesh = await asyncio.to_thread(client.query_mesh)
            assert [(node.info.name, node.connected, node.free_slots) for node in mesh.nodes] == [
                ("atlas-1", True, 2),
                ("atlas-2", True, 2),
            ]
            job_id, epoch = await asyncio.to_thread(client.submit_job, spec(2, 2))
            updates = await asyncio.to_thread(_updates_until_running, client, job_id)
            assert updates[-1].certificate is not None
            await until(lambda: first.topologies and second.topologies)
            topology, certificates = second.topologies[0]
            assert [member.node_name for member in topology.members] == ["atlas-1", "atlas-1", "atlas-2", "atlas-2"]
            assert [certificate.rank for certificate in certificates] == [2, 3]
            key = UnitKey(job_id=job_id, epoch=epoch, step=0, rank=Rank(2))
            second.link.claim(Unit(key=key, micro_batches=4))
            await asyncio.to_thread(client.report_units, [Unit(key=key, micro_batches=4)])
            await until(lambda: second.earnings.confirmed_micro == 4000)
            await asyncio.to_thread(client.end_job, job_id, JobState.FINISHED, "done")
            await until(lambda: first.releases and second.releases)


def _updates_until_running(client: HubClient, job_id: JobId) -> list[JobUpdate]:
    updates: list[JobUpdate] = []
    for update in client.watch_job(job_id):
        updates.append(update)
        if update.state is not JobState.PLACED:
            break
    assert updates[-1].state is JobState.RUNNING, updates
    return updates
