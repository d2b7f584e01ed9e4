"""The parts of the simulator: time, network, disk and plans."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from distensor.comm.tokens import Role
from distensor.core.errors import HubUnreachableError, StoreError
from distensor.hub import access
from distensor.hub.writer import Work, commit
from distensor.testing.simulation.disk import Disk, MemoryDisk, SimulatedWriter, SqliteDisk, WatchedStore, Written
from distensor.testing.simulation.faults import FaultKind, plan
from distensor.testing.simulation.loop import PartyClock, StalledError, VirtualLoop
from distensor.testing.simulation.network import Connection, Context, Network
from distensor.testing.simulation.trace import Trace


def in_virtual_time(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """What it returns, and at what time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine), loop.time()
    finally:
        loop.finish()


# Time


def test_a_week_of_sleep_passes_at_once() -> None:
    assert in_virtual_time(asyncio.sleep(7 * 86400.0, "slept")) == ("slept", 7 * 86400.0)


def test_who_waits_for_nobody_is_told() -> None:
    loop = VirtualLoop()
    with pytest.raises(StalledError, match="nothing is left"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_timers_come_in_order_and_a_thread_is_none() -> None:
    async def turns() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, seen.append, "two")
        loop.call_later(1.0, seen.append, "one")
        seen.append(await asyncio.to_thread(lambda: "now"))
        await asyncio.sleep(3.0)
        return seen

    assert in_virtual_time(turns())[0] == ["now", "one", "two"]


def test_sets_of_tasks_have_the_order_of_their_making() -> None:
    async def order() -> list[int]:
        tasks = [asyncio.get_running_loop().create_task(asyncio.sleep(1.0, number)) for number in range(50)]
        done, _ = await asyncio.wait(tasks)
        return [task.result() for task in done]

    assert in_virtual_time(order())[0] == in_virtual_time(order())[0]


def test_a_clock_that_is_set_leaves_durations_alone() -> None:
    loop = VirtualLoop()
    clock = PartyClock(loop, wall=1e9, since_boot=50.0)
    clock.jump_wall(-3600.0)
    assert (clock.now(), clock.monotonic()) == (1e9 - 3600.0, 50.0)
    clock.reboot(3.0)
    assert clock.monotonic() == 3.0
    with pytest.raises(AssertionError, match="block the whole simulation"):
        clock.sleep(1.0)
    loop.close()


# Network


class _Message:
    """As much of a protobuf message as the network looks at."""

    def __init__(self, text: str) -> None:
        self.text = text

    def ByteSize(self) -> int:
        return len(self.text)


class _EchoHost:
    """A hub that answers each message of a stream with the same one."""

    servicer: Any = None

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)


async def _echo(_: Any, context: Context) -> None:
    while True:
        await context.write(await context.read())


async def _world() -> Network:
    loop = asyncio.get_running_loop()
    network = Network(loop, random.Random(1), Trace(loop.time))
    network.host = _EchoHost()
    return network


async def _connected(network: Network) -> Connection:
    return await network.connect("node", (), _echo)


def test_a_stream_keeps_its_order_over_a_cut() -> None:
    async def story() -> tuple[list[str], float]:
        network = await _world()
        connection = await _connected(network)
        network.cut("node")
        for number in range(9):
            await connection.write(_Message(str(number)))
        asyncio.get_running_loop().call_later(8.0, network.path("node").heal)
        texts = [(await connection.read()).text for _ in range(9)]
        connection.cancel()
        return texts, network.time()

    (texts, when), _ = in_virtual_time(story())
    assert texts == [str(number) for number in range(9)]
    assert 8.0 <= when < 9.0


def test_keep_alives_end_what_a_long_cut_has_made_useless() -> None:
    async def story() -> tuple[grpc.StatusCode, float, bool]:
        network = await _world()
        connection = await _connected(network)
        network.cut("node")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await connection.read()
        when = network.time()
        await asyncio.sleep(20.0)
        return ended.value.code(), when, connection.served

    (code, when, served), _ = in_virtual_time(story())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert 15.0 <= when < 16.0
    assert not served, "the hub's end has its own keep-alive"


def test_a_hub_without_power_is_silent_and_one_that_was_killed_is_not() -> None:
    async def story(quiet: bool) -> float:
        network = await _world()
        connection = await _connected(network)
        network.host, network.machine_up = None, not quiet
        connection.lose_server(quiet=quiet)
        with pytest.raises(grpc.aio.AioRpcError):
            await connection.read()
        return network.time()

    assert in_virtual_time(story(quiet=False))[0] < 1.0
    assert in_virtual_time(story(quiet=True))[0] >= 15.0


def test_nobody_is_refused_at_once_and_silence_takes_ten_seconds() -> None:
    async def story(up: bool) -> float:
        network = await _world()
        network.host, network.machine_up = None, up
        with pytest.raises(HubUnreachableError, match="refused" if up else "within 10 s"):
            await _connected(network)
        return network.time()

    assert in_virtual_time(story(up=True))[0] < 1.0
    assert in_virtual_time(story(up=False))[0] == pytest.approx(10.0)


# Disk


@pytest.fixture(params=["memory", "sqlite"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return MemoryDisk() if request.param == "memory" else SqliteDisk(tmp_path)


class _Tear(random.Random):
    """Dice that fall on the same part of each range."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self._part = part

    def random(self) -> float:
        return 0.999

    def randint(self, a: int, b: int) -> int:
        return a + int((b - a) * self._part)


def _token(number: int) -> Any:
    return access.token_for(f"secret-{number}", Role.NODE, "node")


def _has(disk: Disk, number: int) -> bool:
    with disk.open().transaction() as books:
        return books.find_token(access.hash_secret(f"secret-{number}")) is not None


def test_what_was_promised_survives_every_crash(disk: Disk) -> None:
    dice = random.Random(3)
    for number in range(8):
        with disk.open().transaction() as books:
            books.save_token(_token(number))
        disk.acknowledge()
        disk.crash(dice)
        assert all(_has(disk, before) for before in range(number + 1))
    disk.close()


def test_a_commit_that_nobody_was_promised_is_kept_or_lost_but_whole(tmp_path: Path) -> None:
    """The tear is anywhere in what was written since: the last byte is one place of thousands."""
    kept = set()
    for draw in (0.0, 0.3, 0.7, 1.0):
        folder = tmp_path / str(draw)
        folder.mkdir()
        disk = SqliteDisk(folder)
        store = disk.open()
        with store.transaction() as books:
            books.save_token(_token(1))
            books.save_token(_token(2))
        disk.crash(_Tear(draw))
        found = (_has(disk, 1), _has(disk, 2))
        assert found in ((True, True), (False, False))
        kept.add(found[0])
        disk.close()
    assert kept == {True, False}


def test_power_that_fails_inside_a_transaction_leaves_nothing_of_it(disk: Disk) -> None:
    dice, died = random.Random(1), []

    def die() -> None:
        disk.freeze(dice)
        raise StoreError("no power")

    store = WatchedStore(disk.open(), died.extend)
    store.dies = die
    with pytest.raises(StoreError):
        commit(store, [Work(lambda books: books.save_token(_token(1)), None)])  # type: ignore[arg-type]
    disk.crash(dice)
    assert not _has(disk, 1)
    assert died == [], "what was not committed was told as if it were"
    disk.close()


def test_a_watched_store_tells_what_was_committed_and_no_part_that_was_taken_back(disk: Disk) -> None:
    told: list[Written] = []
    store = WatchedStore(disk.open(), told.extend)

    def fail(books: Any) -> None:
        books.save_token(_token(2))
        raise ValueError("no")

    works = [Work(lambda books: books.save_token(_token(1)), None), Work(fail, None)]  # type: ignore[arg-type]
    outcomes = commit(store, works)
    assert isinstance(outcomes[1].error, ValueError)
    assert [(one.what, one.values[0].secret_hash) for one in told] == [("save_token", access.hash_secret("secret-1"))]
    disk.close()


def test_a_full_disk_answers_nobody_until_there_is_room() -> None:
    async def story() -> tuple[float, bool]:
        loop = asyncio.get_running_loop()
        store = WatchedStore(MemoryDisk().open(), lambda _: None)
        writer = SimulatedWriter(
            store, random.Random(1), wrote=lambda _: None, answered=lambda: None, died=lambda: None
        )
        store.full = True
        loop.call_later(4.5, setattr, store, "full", False)
        done = writer.submit(lambda books: books.save_token(_token(1)))
        assert not writer.idle
        await done
        return loop.time(), writer.idle

    (when, idle), _ = in_virtual_time(story())
    assert 4.5 <= when < 6.0
    assert idle


def test_a_torn_log_is_no_error_of_sqlite(tmp_path: Path) -> None:
    disk = SqliteDisk(tmp_path)
    with disk.open().transaction() as books:
        books.save_token(_token(1))
    disk.crash(random.Random(0))
    disk.open()
    (path,) = tmp_path.glob("*.sqlite")
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    disk.close()


# Plans


def test_a_plan_has_every_kind_of_fault_in_its_time() -> None:
    faults = plan(random.Random(1), first=5.0, last=5000.0, every=2.0)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert all(5.0 < fault.at < 5000.0 and 0.0 <= fault.draw < 1.0 for fault in faults)
    assert [fault.number for fault in faults] == list(range(len(faults)))
    assert len(faults) == pytest.approx(2500, rel=0.1)
