"""The service between machine, books and wire: what is not written is not said."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import HubProcess, WordNode, info, spec, until

from distensor.comm import HubClient, LinkState
from distensor.comm.address import HubAddress
from distensor.comm.messages import Heartbeat
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import JobState, TakeOver
from distensor.core.errors import HubUnreachableError, JobHeldError, PlacementError
from distensor.core.ids import Generation, NodeId
from distensor.hub.accounts import MAIN, Quota
from distensor.hub.administration import Clerk, set_quota
from distensor.hub.app import HubConfig, Ready, run_hub
from distensor.hub.effects import SaveInfo, SessionId
from distensor.hub.machine import Patience
from distensor.hub.membership import Membership
from distensor.hub.records import NodeRecord
from distensor.hub.service import save_all
from distensor.hub.stores.books import SqlBooks
from distensor.hub.stores.sqlite import SqliteStore

pytestmark = pytest.mark.asyncio


class Hub:
    """`run_hub` in a task."""

    def __init__(self, state: Path) -> None:
        self.stop = asyncio.Event()
        self.lines: list[str] = []
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        config = HubConfig(
            state=state,
            listen=HubAddress(host="127.0.0.1", port=0),
            node_tokens=1,
            patience=Patience(heartbeat=0.1),
        )
        self.task = asyncio.create_task(
            run_hub(
                config,
                clock=SYSTEM_CLOCK,
                on_ready=self._ready.set_result,
                log=self.lines.append,
                stop=self.stop,
            )
        )

    async def ready(self) -> Ready:
        return await asyncio.wait_for(self._ready, 10)


async def test_a_job_is_not_acknowledged_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    insert = SqlBooks.insert_job

    def slow_insert(books: SqlBooks, job: Any) -> None:
        assert gate.wait(20)
        insert(books, job)

    monkeypatch.setattr(SqlBooks, "insert_job", slow_insert)
    hub = Hub(tmp_path / "hub")
    ready = await hub.ready()
    node = WordNode("atlas-1", ready.node_tokens[0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    with HubClient(ready.trainer_token) as client:
        await until(lambda: node.connected)
        submitting = asyncio.create_task(asyncio.to_thread(client.submit_job, spec()))
        done, _ = await asyncio.wait([submitting], timeout=0.5)
        assert not done
        assert node.assignments == [], "a node was told of a job that is not written yet"
        gate.set()
        job_id, _ = await asyncio.wait_for(submitting, 10)
        await until(lambda: [one.job_id for one in node.assignments] == [job_id])
    linking.cancel()
    await asyncio.gather(linking, return_exceptions=True)
    hub.stop.set()
    await asyncio.wait_for(hub.task, 10)


async def test_a_record_that_cannot_be_written_ends_the_hub_instead_of_a_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(books: SqlBooks, job: Any) -> None:
        raise LookupError("a defect")

    monkeypatch.setattr(SqlBooks, "insert_job", broken)
    hub = Hub(tmp_path / "hub")
    ready = await hub.ready()
    node = WordNode("atlas-1", ready.node_tokens[0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    with HubClient(ready.trainer_token, timeout=3) as client:
        await until(lambda: node.connected)
        with pytest.raises(HubUnreachableError):
            await asyncio.to_thread(client.submit_job, spec())
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(hub.task, 10)
    assert caught.group_contains(LookupError, match="a defect")
    assert node.assignments == []
    linking.cancel()
    await asyncio.gather(linking, return_exceptions=True)
    SqliteStore(tmp_path / "hub" / "hub.sqlite").close()


async def test_a_hub_that_stands_still_is_noticed_and_taken_back(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state", tokens=1)
    node = WordNode("atlas-1", hub.ready["node_tokens"][0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    with HubClient(hub.ready["trainer_token"]) as client:
        await until(lambda: node.connected)
        job_id, epoch = await asyncio.to_thread(client.submit_job, spec())
        await until(lambda: node.topologies)
        hub.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: node.link.status.state is LinkState.OFFLINE)
        finally:
            hub.process.send_signal(signal.SIGCONT)
        await until(lambda: node.connected)
        mesh = await asyncio.to_thread(client.query_mesh)
        assert [(one.info.name, one.connected) for one in mesh.nodes] == [("atlas-1", True)]
        assert node.held == {(job_id, epoch, 0)}
        assert node.releases == []
        watched = await asyncio.to_thread(next, client.watch_job(job_id))
        assert watched.state is JobState.RUNNING
    linking.cancel()
    await asyncio.gather(linking, return_exceptions=True)
    assert hub.stop() == 0


async def test_a_job_is_taken_over_once_its_trainer_is_gone(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "hub")
    ready = await hub.ready()
    node = WordNode("atlas-1", ready.node_tokens[0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    with HubClient(ready.trainer_token) as again:
        with HubClient(ready.trainer_token) as before:
            await until(lambda: node.connected)
            job_id, _ = await asyncio.to_thread(before.submit_job, spec())
            watch = before.watch_job(job_id)
            assert (await asyncio.to_thread(next, watch)).job_id == job_id
            taken = TakeOver(job_id=job_id, request="again", csr_pem=spec().csr_pem)
            with pytest.raises(JobHeldError, match="its trainer is connected"):
                await asyncio.to_thread(again.take_over_job, taken)
        assert await asyncio.wait_for(asyncio.to_thread(taken_over, again, taken), 20) == 2
    linking.cancel()
    await asyncio.gather(linking, return_exceptions=True)
    hub.stop.set()
    await asyncio.wait_for(hub.task, 10)


def taken_over(client: HubClient, taken: TakeOver) -> int:
    """The epoch, once the hub has noticed that the trainer before is gone."""
    while True:
        try:
            return client.take_over_job(taken)[0]
        except JobHeldError:
            SYSTEM_CLOCK.sleep(0.01)


async def test_the_limits_of_accounts_are_in_force_from_the_first_moment_after_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "hub"
    hub = Hub(state)
    await hub.ready()
    hub.stop.set()
    await hub.task
    with closing(SqliteStore(state / "hub.sqlite")) as store, store.transaction() as books:
        set_quota(books, Clerk(actor="test", now=0), MAIN, Quota(workers=1, priority=2))
    hub = Hub(state)
    with HubClient((await hub.ready()).trainer_token) as client:
        urgent = replace(spec(submission="urgent"), priority=2, wait=True)
        waiting, _ = await asyncio.to_thread(client.submit_job, urgent)
    hub.stop.set()
    await hub.task
    hub = Hub(state)
    ready = await hub.ready()
    node = WordNode("atlas-1", ready.node_tokens[0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    with HubClient(ready.trainer_token) as client:
        await until(lambda: [one.job_id for one in node.assignments] == [waiting], what="its priority is not refused")
        with pytest.raises(PlacementError, match="account main uses 1 for other jobs and may use 1 at once"):
            await asyncio.to_thread(client.submit_job, spec(submission="second"))
    linking.cancel()
    await asyncio.gather(linking, return_exceptions=True)
    hub.stop.set()
    await hub.task


async def test_what_a_node_says_of_itself_does_not_undo_a_new_credential(tmp_path: Path) -> None:
    """Both are on their way to the books where a machine has joined again while its old stream goes on."""
    node = NodeId("n_a")
    old = NodeRecord(node_id=node, secret_hash="old", info=replace(info("atlas"), node_id=node))
    members = Membership(generation=Generation(1), nodes=[old], heartbeat=2.0, silent_beats=5, now=0.0)
    members.join(SessionId(1), node, old.info, 0.0)
    said = Heartbeat(sequence=1, accepting=True, info=replace(old.info, version="9.9"))
    effects = members.beat(SessionId(1), said, 1.0, 1.0)
    with closing(SqliteStore(tmp_path / "hub.sqlite")) as store, store.transaction() as books:
        books.save_node(old)
        books.save_node(replace(old, secret_hash="new"))
        save_all(books, [effect for effect in effects if isinstance(effect, SaveInfo)], 0)
        [kept] = books.snapshot().nodes
    assert (kept.secret_hash, kept.info.version) == ("new", "9.9")
