"""HubClient against a real hub."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from comm_kit import client_of, hub_of, node_of, running
from hub_kit import spec, until

from distensor.comm import HubClient
from distensor.core.control import JobState, JobUpdate, Unit, UnitKey, WorkerChange, WorkerState
from distensor.core.errors import (
    ControlError,
    HubProtocolError,
    HubUnreachableError,
    PlacementError,
)
from distensor.core.ids import JobId, Rank

pytestmark = pytest.mark.asyncio


# The trainer's calls


async def collect(client: HubClient, job_id: JobId, into: list[JobUpdate]) -> None:
    def drain() -> None:
        into.extend(client.watch_job(job_id))

    await asyncio.to_thread(drain)


async def test_a_watch_goes_on_over_a_restart_and_ends_with_the_job(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, epoch = await asyncio.to_thread(client.submit_job, spec())
        updates: list[JobUpdate] = []

        watching = asyncio.create_task(collect(client, job_id, updates))
        await until(lambda: updates and updates[-1].state is JobState.RUNNING)
        await hub.stop()
        await hub.start()
        await until(lambda: node.connected)
        lost = WorkerChange(
            job_id=job_id,
            epoch=epoch,
            rank=Rank(0),
            state=WorkerState.EXITED,
            restarts=1,
            reason="killed by signal 9 (SIGKILL)",
        )
        node.link.report(lost)
        await until(lambda: updates[-1].workers == (lost,))
        await asyncio.to_thread(client.end_job, job_id, JobState.FAILED, "a worker was lost")
        await asyncio.wait_for(watching, 10)
        assert (updates[-1].state, updates[-1].reason) == (JobState.FAILED, "a worker was lost")
        assert len(updates) == len({repr(update) for update in updates}), "no update is passed on twice in a row"


async def test_a_watch_is_closed_from_another_thread(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, _ = await asyncio.to_thread(client.submit_job, spec())
        updates: list[JobUpdate] = []
        watching = asyncio.create_task(collect(client, job_id, updates))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(client.close)
        await asyncio.wait_for(watching, 5)
        with pytest.raises(HubUnreachableError, match="has been closed"):
            client.query_mesh()


async def test_a_call_waits_for_a_hub_that_restarts(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        await asyncio.to_thread(client.query_mesh)
        await hub.stop()
        asking = asyncio.create_task(asyncio.to_thread(client.query_mesh))
        await asyncio.sleep(0.3)
        await hub.start()
        assert (await asyncio.wait_for(asking, 10)).generation == 2


async def test_a_call_gives_up_on_a_hub_that_stays_away(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        client = HubClient(hub.ready.trainer_token, timeout=1)
        await asyncio.to_thread(client.query_mesh)
        await hub.stop()
        with pytest.raises(HubUnreachableError, match=str(hub.ready.address)):
            await asyncio.to_thread(client.query_mesh)
        client.close()


async def test_errors_of_the_hub_arrive_with_their_words(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        unit = Unit(key=UnitKey(job_id=JobId("j_x"), epoch=1, step=0, rank=Rank(0)), micro_batches=1)  # type: ignore[arg-type]
        calls = [
            (lambda: client.submit_job(spec(2, 2)), PlacementError, "needs 4 workers"),
            (lambda: client.submit_job(spec(csr="junk")), PlacementError, "free slots"),
            (lambda: client.end_job(JobId("j_x"), JobState.FINISHED), ControlError, "knows no job j_x"),
            (lambda: list(client.watch_job(JobId("j_x"))), ControlError, "knows no job j_x"),
            (lambda: client.end_job(JobId("j_x"), JobState.PLACED), ControlError, "knows no job j_x"),
            (lambda: client.report_units([unit]), ControlError, "never placed"),
            (lambda: client.submit_job(spec(name="bad name")), HubProtocolError, "'bad name'"),
        ]
        for call, kind, words in calls:
            with pytest.raises(kind, match=words):
                await asyncio.to_thread(call)
        mine, _ = await asyncio.to_thread(client.submit_job, replace(spec(), wait=True))
        with pytest.raises(HubProtocolError, match="expected finished, failed or cancelled"):
            await asyncio.to_thread(client.end_job, mine, JobState.PLACED)
