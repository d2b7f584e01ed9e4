"""Group commit: one thread writes, many wait, and nobody hears 'done' before the disk has it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from distensor.comm.failures import READ_ONLY
from distensor.core.clock import Clock
from distensor.core.errors import BooksRefusedError, ReadOnlyError, StoreError, SupersededError
from distensor.hub.repository import Books, Store

T = TypeVar("T")

LARGEST_GROUP = 512
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """A function on the books, and who waits for it."""

    run: Callable[[Books], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a function gave or raised; nothing of one that raised stays in the books."""

    value: Any = None
    error: BaseException | None = None


class Writes(Protocol):
    """What the hub needs of a writer."""

    def submit(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        """A future that is done once the changes of `run` are on the disk."""

    def read(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        """A future of what `run` finds in the committed books. Goes on while nothing can be written."""

    def require_writable(self) -> None:
        """Raises: ReadOnlyError: the last commit failed; what begins something new should not be begun now."""


class Writer:
    """Runs functions on the books, in order, many to a transaction.

    A function that raises takes only its own changes back. When the commit itself fails (a full disk), nobody is
    answered and the same group is tried again until it succeeds: what callers see is a hub that is slow, not one
    that forgets. Meanwhile `read` goes on, and `require_writable` says what is the matter.
    """

    def __init__(self, store: Store, clock: Clock, on_trouble: Callable[[StoreError], None]) -> None:
        self._store = store
        self._clock = clock
        self._on_trouble = on_trouble
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._trouble: StoreError | None = None
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub-reader")
        self._thread = threading.Thread(target=self._work, name="hub-writer", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        """A future that is done once the changes of `run` are on the disk."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(Work(run, future))
        return future

    def read(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        """A future of what `run` finds in the committed books."""
        return self._loop.run_in_executor(self._readers, self._read, run)

    def _read(self, run: Callable[[Books], T]) -> T:
        with self._store.reading() as books:
            return run(books)

    def require_writable(self) -> None:
        """Raises: ReadOnlyError: the last commit failed, and its group is being tried again."""
        if (trouble := self._trouble) is not None:
            raise ReadOnlyError(f"{READ_ONLY} ({trouble}); try again later")

    async def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._stopping.set()
        self._store.give_up()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)

    def _work(self) -> None:
        more = True
        while more:
            group, more = self._next_group()
            if group:
                self._commit_until_done(group)

    def _next_group(self) -> tuple[list[Work], bool]:
        group: list[Work] = []
        item = self._queue.get()
        while item is not None:
            group.append(item)
            if len(group) >= LARGEST_GROUP or self._queue.empty():
                return group, True
            item = self._queue.get()
        return group, False

    def _commit_until_done(self, group: list[Work]) -> None:
        while True:
            try:
                outcomes = commit(self._store, group)
            except SupersededError as error:  # for ever: whoever waits hears it, and the hub ends
                self._loop.call_soon_threadsafe(answer, group, [Outcome(error=error)] * len(group))
                return
            except StoreError as error:
                self._trouble = error
                if self._stopping.is_set():
                    return  # nobody has been answered; the callers send it again to the next hub
                self._on_trouble(error)
                self._clock.sleep(RETRY_SECONDS)
            else:
                self._trouble = None
                self._loop.call_soon_threadsafe(answer, group, outcomes)
                return


def commit(store: Store, group: Sequence[Work]) -> list[Outcome]:
    """All of the group in one transaction; a function that raises takes only its own changes back.

    Most groups have no such function, so the group is run without save points first, which are two more statements
    for each. Where one raises, nothing has been committed, and the group is run again with them.

    Raises:
        StoreError: nothing of the group was committed.
    """
    try:
        with store.transaction() as books:
            return [Outcome(value=work.run(books)) for work in group]
    except BooksRefusedError:
        return _commit_by_parts(store, group)
    except StoreError:
        raise
    except Exception:  # noqa: BLE001  # whoever raised it gets it from the second run
        return _commit_by_parts(store, group)


def _commit_by_parts(store: Store, group: Sequence[Work]) -> list[Outcome]:
    with store.transaction() as books:
        return [_run_one(store, books, work) for work in group]


def _run_one(store: Store, books: Books, work: Work) -> Outcome:
    try:
        with store.part():
            return Outcome(value=work.run(books))
    except StoreError:
        raise
    except Exception as error:  # noqa: BLE001  # it belongs to the caller, who gets it from the future
        return Outcome(error=error)


def answer(group: list[Work], outcomes: list[Outcome]) -> None:
    """Tell who waits, in their event loop."""
    for work, outcome in zip(group, outcomes, strict=True):
        if work.future.done():
            continue
        if outcome.error is None:
            work.future.set_result(outcome.value)
        else:
            work.future.set_exception(outcome.error)
