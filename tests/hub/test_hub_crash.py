"""kill -9 at random points under load: nothing acknowledged is lost, nothing is credited twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import HubProcess, WordNode, spec, until
from postgres_kit import PASSWORD, PostgresServer
from test_hub_metering import JOB, claim, fill, receive

from distensor.comm import HubClient
from distensor.core.control import JobState, Unit, UnitKey
from distensor.core.errors import HubUnreachableError, PlacementError, StoreError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.hub.administration import Clerk
from distensor.hub.cashier import deposit
from distensor.hub.ledger.accounts import Policy
from distensor.hub.ledger.transfers import MAY_BE_NEGATIVE
from distensor.hub.stores.address import Database
from distensor.hub.stores.opening import open_store
from distensor.hub.stores.sqlite import SqliteStore

KILLS = 12
KILLS_WITH_DATABASE = 9
MANY_KILLS = 100
NODES = 3
MOST_STEPS = 6
TERMS = Policy(deposits=True, fee_per_mille=77)


@dataclass
class Load:
    """A trainer that submits, reports and ends jobs, and remembers what the hub said yes to."""

    client: HubClient
    nodes: list[WordNode]
    random: random.Random
    database: Database = Path("none")
    fee_per_mille: int = 0
    submitted: dict[str, tuple[JobId, Epoch]] = field(default_factory=dict)
    received: dict[UnitKey, int] = field(default_factory=dict)
    claimed: dict[UnitKey, int] = field(default_factory=dict)
    ended: set[JobId] = field(default_factory=set)
    deposited: dict[str, int] = field(default_factory=dict)
    acknowledged: int = 0
    stopping: bool = False

    async def run(self) -> None:
        number = 0
        while not self.stopping:
            number += 1
            await self._one_job(f"s{number}")

    async def _one_job(self, submission: str) -> None:
        await self._deposit(submission, self.random.randint(1, 2 * MOST_STEPS * 2 * 3000))
        wanted = replace(spec(1, 2, submission=submission), steps=MOST_STEPS, micro_batches=3)
        try:
            job_id, epoch = await self._insist(self.client.submit_job, wanted)
        except PlacementError:
            await asyncio.sleep(0.02)  # the nodes are on their way back, or the deposit does not cover it
            return
        await self._held(job_id)
        again = await self._insist(self.client.submit_job, wanted)
        assert again == (job_id, epoch), "the same submission became another job"
        self.submitted[submission] = (job_id, epoch)
        for step in range(self.random.randint(1, MOST_STEPS)):
            await self._one_step(job_id, epoch, step)
        await self._insist(self.client.end_job, job_id, JobState.FINISHED, "done")
        self.ended.add(job_id)

    async def _deposit(self, key: str, micro: int) -> None:
        """As `distensor hub deposit` does, beside the hub, until it was told that it is done."""

        def once() -> None:
            with closing(open_store(self.database)) as store, store.transaction() as books:
                deposit(books, Clerk(actor="operator", now=0), "main", micro, key)

        while True:
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(once)
                self.deposited[key] = micro
                self.acknowledged += 1
                return
            await asyncio.sleep(0.05)  # the database is away: leave it the processor to come back

    async def _held(self, job_id: JobId) -> None:
        """Wait, but not for ever, until the nodes have their assignments, so that they have something to claim."""
        for _ in range(200):
            if sum(ref[0] == job_id for node in self.nodes for ref in node.held) == 2:
                return
            await asyncio.sleep(0.01)

    async def _one_step(self, job_id: JobId, epoch: Epoch, step: int) -> None:
        units = []
        for rank in range(2):
            key = UnitKey(job_id=job_id, epoch=epoch, step=step, rank=Rank(rank))
            units.append(Unit(key=key, micro_batches=1 + step % 3))
            for node in self.nodes:
                if (job_id, epoch, Rank(rank)) in node.held:
                    node.link.claim(units[-1])
                    self.claimed[key] = units[-1].micro_batches
        await self._insist(self.client.report_units, units)
        for unit in units:
            self.received[unit.key] = unit.micro_batches

    async def _insist(self, call, *args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN202
        """Repeat a call until the hub has answered it, as the trainer does."""
        while True:
            try:
                answer = await asyncio.to_thread(call, *args)
            except HubUnreachableError:
                continue
            self.acknowledged += 1
            return answer


Look = Callable[[str], list[tuple[Any, ...]]]
"""Asks the database of a hub that is not running."""


def look_in(path: Path) -> Look:
    def look(query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute(query).fetchall()

    return look


@pytest.fixture
def processes() -> Iterator[list[HubProcess]]:
    started: list[HubProcess] = []
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.stop()


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_kill_at_random_points(tmp_path: Path, processes: list[HubProcess]) -> None:
    await kill_under_load(KILLS, tmp_path, processes, look_in(tmp_path / "state" / "hub.sqlite"))


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_a_hundred_kills(tmp_path: Path, processes: list[HubProcess]) -> None:
    await kill_under_load(MANY_KILLS, tmp_path, processes, look_in(tmp_path / "state" / "hub.sqlite"))


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_kill_hub_and_postgresql(tmp_path: Path, processes: list[HubProcess]) -> None:
    await _kill_with_postgres(KILLS_WITH_DATABASE, tmp_path, processes)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(3600)
async def test_a_hundred_kills_of_hub_and_postgresql(tmp_path: Path, processes: list[HubProcess]) -> None:
    await _kill_with_postgres(MANY_KILLS, tmp_path, processes)


async def _kill_with_postgres(kills: int, tmp_path: Path, processes: list[HubProcess]) -> None:
    """Every third kill is for the database, whose hub stays and goes on by itself when it is back."""
    server = await asyncio.to_thread(PostgresServer)
    try:
        address = server.new_database()
        env = {"DISTENSOR_DATABASE": server.url(address), "DISTENSOR_DATABASE_PASSWORD": PASSWORD}

        def look(query: str) -> list[tuple[Any, ...]]:
            with server.connect(address) as connection:
                return connection.execute(query.encode()).fetchall()

        await kill_under_load(kills, tmp_path, processes, look, env=env, server=server, database=address)
    finally:
        await asyncio.to_thread(server.close)


async def kill_under_load(
    kills: int,
    tmp_path: Path,
    processes: list[HubProcess],
    look: Look,
    *,
    env: dict[str, str] | None = None,
    server: PostgresServer | None = None,
    database: Database | None = None,
) -> None:
    """Load from three nodes and a trainer; kills at random moments; then what was acknowledged against the books."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    hub = HubProcess(tmp_path / "state", tokens=NODES, env=env)
    processes.append(hub)
    nodes = [WordNode(f"atlas-{i}", token, tmp_path / f"n{i}.json") for i, token in enumerate(hub.ready["node_tokens"])]
    tasks = [asyncio.create_task(node.link.run()) for node in nodes]
    client = HubClient(hub.ready["trainer_token"], timeout=5)
    database = database or tmp_path / "state" / "hub.sqlite"
    with closing(open_store(database)) as store, store.transaction() as books:
        books.save_policy(TERMS)
    load = Load(client=client, nodes=nodes, random=dice, database=database, fee_per_mille=TERMS.fee_per_mille)
    working = asyncio.create_task(load.run())
    generation = 1
    try:
        for kill in range(kills):
            if kill % 2 == 1:  # on a busy machine most hubs would else die before anybody is back
                before = load.acknowledged
                await until(lambda: load.acknowledged > before or working.done(), seconds=60, what="a call answered")  # noqa: B023  # used at once
            await asyncio.sleep(dice.uniform(0.02, 0.6))
            assert not working.done(), working.exception()
            if server is not None and kill % 3 == 2:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                continue
            hub.kill()
            hub = await asyncio.to_thread(hub.restart)
            processes.append(hub)
            generation += 1
            assert hub.ready["generation"] == generation
        await until(lambda: all(node.connected for node in nodes), what="all nodes back")
        load.stopping = True
        await asyncio.wait_for(working, 60)
        await until(lambda: all(node.link.unanswered_claims == 0 for node in nodes), what="claims booked")
        mesh = await asyncio.to_thread(client.query_mesh)
    finally:
        working.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(working, *tasks, return_exceptions=True)
        await asyncio.to_thread(client.close)
    assert hub.stop() == 0
    assert "Traceback" not in hub.log(), hub.log()
    lost, twice = check(look, load)
    credited = sum(node.confirmed_micro for node in mesh.nodes)
    print(
        f"kills {kills}, acknowledged calls {load.acknowledged}, jobs {len(load.submitted)}, units received "
        f"{len(load.received)}, deposits {len(load.deposited)}, micro-credits credited {credited}, lost {lost}, "
        f"credited twice {twice}"
    )
    assert (lost, twice) == (0, 0)
    assert load.acknowledged >= kills // 2
    assert credited > 0
    assert sorted(node.info.name for node in mesh.nodes) == [f"atlas-{i}" for i in range(NODES)]


def test_the_check_finds_what_is_planted(tmp_path: Path) -> None:
    path = tmp_path / "hub.sqlite"
    key = UnitKey(job_id=JOB, epoch=Epoch(2), step=0, rank=Rank(0))
    with closing(SqliteStore(path)) as store:
        fill(store)
        claim(store, Unit(key=key, micro_batches=2))
        receive(store, Unit(key=key, micro_batches=2))
    load = Load(client=None, nodes=[], random=random.Random(0))  # type: ignore[arg-type]
    load.submitted, load.claimed, load.received = {"s": (JOB, Epoch(2))}, {key: 2}, {key: 2}
    assert check(look_in(path), load) == (0, 0)
    load.deposited["k"] = 5
    assert check(look_in(path), load) == (1, 0)
    load.deposited.clear()
    load.submitted["s2"] = (JobId("j_2"), Epoch(1))
    load.received[replace(key, step=1)] = 1
    load.ended.add(JOB)
    assert check(look_in(path), load)[0] == 3
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE balances SET amount = 2 * amount")
        connection.execute("UPDATE moved SET amount = 2 * amount")
    assert check(look_in(path), load)[1] == 2000


def check(look: Look, load: Load) -> tuple[int, int]:
    """What was acknowledged against what is in the books: how many are lost, how many are credited twice."""
    jobs = {(row[0]): (row[1], row[2], row[3]) for row in look("SELECT submission, job_id, epoch, state FROM jobs")}
    lost = sum(jobs.get(submission, ())[:2] != placed for submission, placed in load.submitted.items())
    states = {row[0]: row[2] for row in jobs.values()}
    lost += sum(states.get(job_id) != "finished" for job_id in load.ended)
    units = {
        UnitKey(job_id=job_id, epoch=epoch, step=step, rank=rank): (claimed, received, state)  # type: ignore[arg-type]
        for job_id, epoch, step, rank, claimed, received, state in look(
            "SELECT job_id, epoch, step, rank, claimed, received, state FROM units"
        )
    }
    nothing = (None, None, None)
    lost += sum(units.get(key, nothing)[1] != size for key, size in load.received.items())
    lost += sum(units.get(key, nothing)[0] != size for key, size in load.claimed.items())
    both = load.received.keys() & load.claimed.keys()
    lost += sum(units.get(key, nothing)[2] != "credited" for key in both)
    postings = look("SELECT count(*), sum(amount), max(amount) FROM entries GROUP BY job_id, epoch, step, rank")
    assert all((count in (2, 3, 4, 5), total) == (True, 0) for count, total, _ in postings)
    assert len(postings) == len(both)
    lost += _lost_money(look, load)
    due = sum(_share(1000 * load.received[key], load.fee_per_mille) for key in both)
    (((paid),),) = look("SELECT coalesce(sum(amount), 0) FROM balances WHERE account LIKE 'pending:%'")
    return lost, abs(int(str(paid)) - due)


def _share(amount: int, fee_per_mille: int) -> int:
    return amount - amount * fee_per_mille // 1000


def _lost_money(look: Look, load: Load) -> int:
    """Deposits and escrows that were acknowledged and are not there; every transfer and all accounts sum to nothing."""
    there = dict(look("SELECT account, sum(amount) FROM (SELECT account, amount FROM balances UNION ALL "
                      "SELECT account, amount FROM moved) AS both_tables GROUP BY account"))  # fmt: skip
    assert sum(there.values()) == 0
    for account, amount in there.items():
        assert amount >= 0 or account in MAY_BE_NEGATIVE, (account, amount)
    assert all(total == 0 for (total,) in look("SELECT sum(amount) FROM legs GROUP BY key"))
    made = dict(look("SELECT transfers.key, amount FROM transfers JOIN legs USING (key) WHERE amount > 0"))
    lost = sum(made.get(f"deposit/{key}") != micro for key, micro in load.deposited.items())
    if load.fee_per_mille:
        lost += sum(made.get(f"escrow/{job_id}") != MOST_STEPS * 2 * 3000 for job_id, _ in load.submitted.values())
    for job_id in load.ended:
        open_units = look("SELECT coalesce(sum(coalesce(claimed, received)), 0) FROM units WHERE state IN "
                          f"('claimed', 'received') AND job_id = '{job_id}'")  # our own id # fmt: skip
        ((size,),) = open_units
        lost += there.get(f"escrow:{job_id}", 0) < 1000 * size
    return lost
