"""Two hubs on one PostgreSQL: when the one that serves is killed, or stops and comes back, nodes and trainers move
to the other; no rank is assigned twice, no unit credited twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import WordNode, spec, until
from postgres_kit import PASSWORD, PostgresServer

from distensor.comm import HubClient
from distensor.comm.credential import load_credential
from distensor.comm.tokens import decode_token
from distensor.core.control import JobState, JobUpdate, Unit, UnitKey
from distensor.core.errors import HubUnreachableError, StoreError, SupersededError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.hub.repository import Books
from distensor.hub.stores import postgres as store_module
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.postgres import PostgresStore, Standby, lease_age


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, for processes that have to know each other's before they listen."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Hub:
    """A hub as an operator starts it, one of two."""

    folder: Path
    database: str
    port: int
    other: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        words = ["hub", "--state", str(self.state), "--json", "--standby", "--exit-with-stdin", "--node-tokens", "2"]
        words += ["--database", self.database, "--listen", f"127.0.0.1:{self.port}"]
        words += ["--other-hub", f"127.0.0.1:{self.other}"]
        with (self.folder / "out").open("wb") as out, (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distensor", *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                env={**os.environ, "DISTENSOR_DATABASE_PASSWORD": PASSWORD},
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def ready(self) -> dict[str, Any] | None:
        """What it printed when it began to serve."""
        text = (self.folder / "out").read_text()
        found: dict[str, Any] | None = json.loads(text) if text.endswith("\n") else None
        return found

    async def serves(self) -> dict[str, Any]:
        await until(lambda: self.ready, seconds=40, what=f"a hub that serves; its log: {self.log}")
        assert self.ready is not None
        return self.ready

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int:
        if self.process is None:
            return 0
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        code = self.process.wait(20)
        if self.process.stdin is not None:
            self.process.stdin.close()
        return code


@pytest.fixture
def hubs(tmp_path: Path, postgres: PostgresServer) -> Iterator[tuple[Hub, Hub]]:
    database = postgres.url(postgres.new_database())
    first, second = free_ports(2)
    pair = Hub(tmp_path / "one", database, first, second), Hub(tmp_path / "two", database, second, first)
    yield pair
    for hub in pair:
        hub.end()


def share_authority(source: Hub, target: Hub) -> None:
    target.state.mkdir(parents=True)
    for name in ("authority.key", "authority.pem"):
        shutil.copy2(source.state / name, target.state / name)


@dataclass
class Work:
    """A trainer with one job on two nodes, which claim what it receives."""

    client: HubClient
    nodes: list[WordNode]
    job_id: JobId = field(init=False)
    epoch: Epoch = field(init=False)
    updates: list[JobUpdate] = field(default_factory=list)
    steps: int = 0

    async def begin(self) -> asyncio.Task[None]:
        self.job_id, self.epoch = await asyncio.to_thread(self.client.submit_job, spec(1, 4))
        watching = asyncio.create_task(asyncio.to_thread(self._watch))
        await until(lambda: self.updates and self.updates[-1].state is JobState.RUNNING, seconds=30, what="a job")
        return watching

    def _watch(self) -> None:
        self.updates.extend(self.client.watch_job(self.job_id))

    async def step(self) -> None:
        """All ranks claim it, and the trainer says that it got it, until a hub has it in its books."""
        units = [
            Unit(key=UnitKey(job_id=self.job_id, epoch=self.epoch, step=self.steps, rank=Rank(rank)), micro_batches=1)
            for rank in range(4)
        ]
        for unit in units:
            for node in self.nodes:
                if (self.job_id, self.epoch, unit.key.rank) in node.held:
                    node.link.claim(unit)
        async with asyncio.timeout(60):
            while not await self._received(units):
                pass
        self.steps += 1

    async def _received(self, units: list[Unit]) -> bool:
        with suppress(HubUnreachableError):
            await asyncio.to_thread(self.client.report_units, units)
            return True
        return False

    async def booked(self) -> None:
        """All units are in the books, and no hub waits for anything."""
        await until(lambda: all(node.link.unanswered_claims == 0 for node in self.nodes), seconds=40, what="claims")


@contextlib.asynccontextmanager
async def work_on(ready: dict[str, Any], folder: Path) -> AsyncIterator[Work]:
    nodes = [WordNode(f"node-{n}", token, folder / f"n{n}.json") for n, token in enumerate(ready["node_tokens"])]
    linking = [asyncio.create_task(node.link.run()) for node in nodes]
    client = HubClient(ready["trainer_token"], timeout=5)
    work = Work(client=client, nodes=nodes)
    try:
        await until(lambda: all(node.connected for node in nodes), seconds=30, what="both nodes")
        yield work
    finally:
        await asyncio.to_thread(client.close)
        for task in linking:
            task.cancel()
        await asyncio.gather(*linking, return_exceptions=True)


def check_books(work: Work, server: PostgresServer, database: DatabaseAddress) -> None:
    """Each unit once, each rank at one place, everything together zero."""
    with server.connect(database) as books:
        units = books.execute("SELECT state, count(*) FROM units GROUP BY state").fetchall()
        assert units == [("credited", 4 * work.steps)]
        twice = books.execute(
            "SELECT job_id, epoch, step, rank FROM entries WHERE amount > 0 "
            "GROUP BY job_id, epoch, step, rank HAVING count(*) > 1"
        ).fetchall()
        assert twice == []
        assert books.execute("SELECT sum(amount), count(*) FROM entries").fetchone() == (0, 8 * work.steps)
        places = books.execute("SELECT epoch, rank FROM ranks ORDER BY rank").fetchall()
        assert places == [(1, rank) for rank in range(4)]
    assigned = [(one.job_id, one.epoch, one.rank) for node in work.nodes for one in node.assignments]
    assert len(assigned) == len(set(assigned)) == 4, "no rank is given out twice"


@pytest.mark.asyncio
@pytest.mark.timeout(240)
async def test_what_one_hub_began_the_other_goes_on_with(
    hubs: tuple[Hub, Hub], tmp_path: Path, postgres: PostgresServer
) -> None:
    one, two = hubs
    one.start()
    ready = await one.serves()
    share_authority(one, two)
    two.start()
    await until(lambda: "waits to take its place" in two.log, seconds=30, what=two.log)
    async with work_on(ready, tmp_path) as work:
        watching = await work.begin()
        await work.step()

        one.signal(signal.SIGKILL)  # the database hears of it at once
        await work.step()
        assert (await two.serves())["generation"] == 2
        await until(lambda: all(node.connected for node in work.nodes), seconds=30, what="nodes at the other hub")
        assert {node.link.status.address for node in work.nodes} == {f"127.0.0.1:{two.port}"}
        one.end()
        one.start()
        await until(lambda: one.log.count("waits to take its place") == 1, seconds=30, what=one.log)

        two.signal(signal.SIGSTOP)  # it keeps its connections and says nothing
        await work.step()
        assert (await one.serves())["generation"] == 3
        await until(lambda: all(node.connected for node in work.nodes), seconds=40, what="nodes back")
        assert two.process is not None
        two.signal(signal.SIGCONT)
        assert await asyncio.to_thread(two.process.wait, 40) == 69
        assert "another hub has taken over; it is at start 3, this one was start 2" in two.log

        await work.step()
        await work.booked()
        assert not watching.done(), "the job goes on"
        await asyncio.to_thread(work.client.end_job, work.job_id, JobState.FINISHED, "done")
        await asyncio.wait_for(watching, 20)
        assert work.updates[-1].state is JobState.FINISHED
        check_books(work, postgres, address_of(postgres, one))
        assert {one.epoch for one in work.updates} == {1}


def address_of(server: PostgresServer, hub: Hub) -> DatabaseAddress:
    return server.address(hub.database.partition("@/")[2].partition("?")[0])


@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_nodes_hear_of_a_hub_that_was_added_and_one_of_another_authority_is_refused(
    hubs: tuple[Hub, Hub], tmp_path: Path
) -> None:
    one, two = hubs
    one.start()
    ready = await one.serves()
    token = ready["node_tokens"][0]
    alone = replace(decode_token(token), others=()).encode()  # as of a hub that had no other one
    node = WordNode("node-0", alone, tmp_path / "n0.json")
    linking = asyncio.create_task(node.link.run())
    try:
        await until(lambda: node.connected, seconds=30, what="the node")
        kept = load_credential(tmp_path / "n0.json")
        assert kept is not None
        assert (kept.address, kept.others) == (f"127.0.0.1:{one.port}", (f"127.0.0.1:{two.port}",))
    finally:
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
    two.start()  # with an authority of its own
    assert two.process is not None
    assert await asyncio.to_thread(two.process.wait, 40) == 73
    assert "copy authority.key and authority.pem" in two.log


@pytest.mark.asyncio
async def test_a_hub_that_waits_ends_when_it_is_told(hubs: tuple[Hub, Hub]) -> None:
    one, two = hubs
    one.start()
    await one.serves()
    share_authority(one, two)
    two.start()
    await until(lambda: "waits to take its place" in two.log, seconds=30, what=two.log)
    assert await asyncio.to_thread(two.end) == 0


# -- the store alone -------------------------------------------------------------------------------------------------


class Turn:
    """A hub that stands by, in a thread."""

    def __init__(self, address: DatabaseAddress) -> None:
        self.ended = threading.Event()
        self.ages: list[float | None] = []
        self.store: PostgresStore | None = None
        self.error: StoreError | None = None
        self._thread = threading.Thread(target=self._wait, args=(address,))
        self._thread.start()

    def _wait(self, address: DatabaseAddress) -> None:
        standby = Standby(ended=self.ended, tell=self.ages.append)
        try:
            self.store = PostgresStore(address, exclusive=True, standby=standby)
        except StoreError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_a_lease_that_is_renewed_is_left_alone_and_one_that_is_not_is_taken(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(store_module, "_RENEWED_EVERY", 0.0)
    address = postgres.new_database()
    with closing(PostgresStore(address, exclusive=True)) as first:
        with first.transaction() as books:
            assert books.begin_generation() == 1
        waiting = Turn(address)
        for _ in range(20):
            before = len(waiting.ages)
            with first.transaction():
                pass
            while len(waiting.ages) == before:
                assert waiting.store is None
        monkeypatch.setattr(store_module, "LEASE_SECONDS", 0.3)  # the first says nothing any more
        waiting.join()
        assert waiting.store is not None
        with closing(waiting.store) as second:
            with second.transaction() as books:
                assert books.begin_generation() == 2
            with pytest.raises(StoreError), first.transaction():
                pass  # its connection was ended
            with pytest.raises(SupersededError, match="at start 2, this one was start 1"), first.transaction():
                pass
            assert lease_age(second._connection) is not None


def test_a_hub_stopped_amid_a_transaction_commits_nothing_of_it(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(store_module, "LEASE_SECONDS", 0.3)
    address = postgres.new_database()
    with closing(PostgresStore(address, exclusive=True)) as first:
        with first.transaction() as books:
            books.begin_generation()
        taken: list[PostgresStore] = []
        with pytest.raises(StoreError), first.transaction() as books:
            taken.append(taken_meanwhile(books, address))
        [second] = taken
        with closing(second), second.reading() as books:
            assert books.authority_mark() is None


def taken_meanwhile(books: Books, address: DatabaseAddress) -> PostgresStore:
    """The hub of these books stands still here, and holds the row of the generation."""
    books.save_authority_mark(7)
    waiting = Turn(address)
    waiting.join()
    assert waiting.store is not None
    with waiting.store.transaction() as others:
        assert others.begin_generation() == 2
    return waiting.store


def test_who_waits_can_be_told_to_stop(postgres: PostgresServer) -> None:
    address = postgres.new_database()
    with closing(PostgresStore(address, exclusive=True)):
        waiting = Turn(address)
        waiting.ended.set()
        waiting.join()
        assert "stopped while another hub" in str(waiting.error)
