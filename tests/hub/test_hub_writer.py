"""Group commit: answers after the disk, one bad apple alone, a full disk is waited out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distensor.comm.tokens import Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import StoreError
from distensor.hub.access import token_for
from distensor.hub.hashing import hash_secret
from distensor.hub.repository import Books
from distensor.hub.writer import Writer
from distensor.testing.clock import FakeClock
from distensor.testing.hub_store import MemoryBooks, MemoryStore


class SlowStore(MemoryStore):
    """A store whose commits wait for a gate, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.commits = 0

    @contextmanager
    def transaction(self) -> Iterator[MemoryBooks]:
        with super().transaction() as books:
            yield books
            self.gate.wait(10)
        self.commits += 1


def save(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
    def run(books: Books) -> str:
        books.save_token(token_for(name, Role.NODE, name))
        return name

    return run


def no_trouble(error: StoreError) -> None:
    raise AssertionError(error)


@pytest.mark.asyncio
async def test_nobody_is_answered_before_the_commit_and_many_share_one() -> None:
    store = SlowStore()
    writer = Writer(store, SYSTEM_CLOCK, no_trouble)
    first = writer.submit(save("first"))
    others = [writer.submit(save(f"t{index}")) for index in range(100)]
    done, _ = await asyncio.wait([first, *others], timeout=0.05)
    assert not done
    store.gate.set()
    assert await asyncio.wait_for(asyncio.gather(first, *others), 5) == ["first", *(f"t{i}" for i in range(100))]
    assert store.commits <= 3
    assert len(store.tables.tokens) == 101
    await writer.close()


@pytest.mark.asyncio
async def test_one_that_raises_takes_only_its_own_changes_back() -> None:
    store = SlowStore()
    writer = Writer(store, SYSTEM_CLOCK, no_trouble)

    def bad(books: Books) -> None:
        save("bad")(books)
        raise LookupError("mine")

    futures = [writer.submit(save("a")), writer.submit(bad), writer.submit(save("b"))]
    store.gate.set()
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 5)
    assert results[0] == "a"
    assert isinstance(results[1], LookupError)
    assert results[2] == "b"
    assert set(store.tables.tokens) == {hash_secret("a"), hash_secret("b")}
    await writer.close()


@pytest.mark.asyncio
async def test_a_full_disk_delays_and_loses_nothing() -> None:
    store, clock, told = MemoryStore(), FakeClock(), []
    store.failures = 2
    writer = Writer(store, clock, told.append)
    future = writer.submit(save("a"))
    for _ in range(2):
        await asyncio.to_thread(clock.wait_for_sleepers, 1)
        assert not future.done()
        assert not store.tables.tokens
        clock.advance(1)
    assert await asyncio.wait_for(future, 5) == "a"
    assert len(told) == 2
    assert set(store.tables.tokens) == {hash_secret("a")}
    await writer.close()


@pytest.mark.asyncio
async def test_the_order_of_submission_is_the_order_of_execution() -> None:
    writer, seen = Writer(MemoryStore(), SYSTEM_CLOCK, no_trouble), []
    futures = [writer.submit(lambda _, index=index: seen.append(index)) for index in range(2000)]
    await asyncio.wait_for(asyncio.gather(*futures), 10)
    assert seen == list(range(2000))
    await writer.close()


@pytest.mark.asyncio
async def test_closing_finishes_what_is_queued() -> None:
    store = MemoryStore()
    writer = Writer(store, SYSTEM_CLOCK, no_trouble)
    future = writer.submit(save("a"))
    await writer.close()
    assert await future == "a"


@pytest.mark.asyncio
async def test_a_caller_that_went_away_does_no_harm() -> None:
    store = SlowStore()
    writer = Writer(store, SYSTEM_CLOCK, no_trouble)
    gone, stays = writer.submit(save("gone")), writer.submit(save("stays"))
    gone.cancel()
    store.gate.set()
    assert await asyncio.wait_for(stays, 5) == "stays"
    await writer.close()
