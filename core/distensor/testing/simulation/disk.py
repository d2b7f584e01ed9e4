"""The hub's disk: books that are committed or not, a crash at any point, and no room for a while."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from distensor.core.errors import ReadOnlyError, StoreError
from distensor.hub.repository import Books, Store
from distensor.hub.stores.sqlite import SqliteStore
from distensor.hub.writer import LARGEST_GROUP, RETRY_SECONDS, Outcome, Work, answer, commit
from distensor.testing.hub_store import MemoryStore

T = TypeVar("T")

SLOWEST_WRITE = 0.02
SLOWEST_ANSWER = 0.05


class Disk(Protocol):
    """What survives a hub."""

    def open(self) -> Store: ...

    def freeze(self, dice: random.Random) -> None:
        """Power fails now: whatever the hub still does to it is lost."""

    def crash(self, dice: random.Random) -> bool:
        """The hub that has it open is gone. What was committed (before it was frozen) stays; False: but for a commit
        of which nobody had heard."""

    def acknowledge(self) -> None:
        """All that is committed now was promised to somebody."""

    def close(self) -> None: ...


class MemoryDisk:
    """Books in memory."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def open(self) -> MemoryStore:
        return self._store

    def freeze(self, dice: random.Random) -> None:
        tables, self._store = self._store.tables, MemoryStore()
        self._store.tables = tables

    def crash(self, dice: random.Random) -> bool:
        self.freeze(dice)
        return True

    def acknowledge(self) -> None:
        """Committed here is safe."""

    def close(self) -> None:
        self._store.close()


class SqliteDisk:
    """The real store in a folder. A crash leaves the file and its log as they are at that moment, of what nobody was
    promised yet perhaps only a part: the next hub opens a copy, torn where the power failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._store: SqliteStore | None = None
        self._promised = 0
        self._frozen = False
        self._whole = True

    def _file(self, number: int) -> Path:
        return self._folder / f"hub-{number}.sqlite"

    def open(self) -> SqliteStore:
        self._store = SqliteStore(self._file(self._number))
        self.acknowledge()
        return self._store

    def acknowledge(self) -> None:
        log = _log_of(self._file(self._number))
        self._promised = log.stat().st_size if log.exists() else 0

    def freeze(self, dice: random.Random) -> None:
        old, new = self._file(self._number), self._file(self._number + 1)
        shutil.copyfile(old, new)
        if _log_of(old).exists():
            shutil.copyfile(_log_of(old), _log_of(new))
            size = _log_of(new).stat().st_size
            with _log_of(new).open("r+b") as log:
                left = log.truncate(self._left(size, dice))
                self._whole = left == size
        self._frozen = True

    def _left(self, size: int, dice: random.Random) -> int:
        """How much of the log a crash leaves: all that was promised, and of the rest all or a part."""
        return size if size <= self._promised or dice.random() < 0.5 else dice.randint(self._promised, size)

    def crash(self, dice: random.Random) -> bool:
        if not self._frozen:
            self.freeze(dice)
        self._frozen = False
        self.close()
        for path in self._folder.glob(f"{self._file(self._number).name}*"):
            path.unlink()
        self._number += 1
        return self._whole

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _log_of(file: Path) -> Path:
    return file.with_name(file.name + "-wal")


@dataclass(frozen=True, slots=True)
class Written:
    """One call that changed the books."""

    what: str
    values: tuple[Any, ...]


_CHANGES = frozenset({
    *("begin_generation", "save_token", "spend_token", "save_node", "save_info"),
    *("insert_job", "update_job", "begin_epoch", "save_rank", "save_units", "post"),
})  # fmt: skip

_LISTS = frozenset({"save_units", "post"})


class _WatchedBooks:
    """Books that keep a list of what was changed."""

    def __init__(self, books: Books, written: list[Written]) -> None:
        self._books = books
        self._written = written

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._books, name)
        if name not in _CHANGES:
            return method

        def call(*values: Any) -> Any:
            if name in _LISTS:
                values = (list(values[0]),)
            result = method(*values)
            self._written.append(Written(name, (*values, result) if name == "begin_generation" else values))
            return result

        return call


class WatchedStore:
    """A store that tells `committed` what each transaction changed, and that can be made to fail.

    Attributes:
        full: every commit fails.
        dies: called once all is written and before it is committed; what it raises ends the transaction.
    """

    def __init__(self, store: Store, committed: Callable[[list[Written]], None]) -> None:
        self._store = store
        self._committed = committed
        self._written: list[Written] = []
        self.full = False
        self.dies: Callable[[], None] | None = None

    @contextmanager
    def transaction(self) -> Iterator[Books]:
        written: list[Written] = []
        self._written = written
        with self._store.transaction() as books:
            yield cast("Books", _WatchedBooks(books, written))
            if self.full:
                raise StoreError("the disk is full")
            if self.dies is not None:
                self.dies()
        self._committed(written)

    @contextmanager
    def part(self) -> Iterator[None]:
        before = len(self._written)
        try:
            with self._store.part():
                yield
        except BaseException:  # whatever it was, the part was taken back; it goes on upwards
            del self._written[before:]
            raise

    def reading(self) -> AbstractContextManager[Books]:
        return self._store.reading()

    def give_up(self) -> None:
        self._store.give_up()

    def close(self) -> None:
        self._store.close()


class DiedError(BaseException):
    """The hub was killed in the middle of a transaction."""


class SimulatedWriter:
    """The real group commit without its thread: a write takes a while, and so does the news of it.

    `wrote` is told of each commit before anybody else hears of it, `answered` when the others do, `died` when the
    hub was killed inside a transaction.
    """

    def __init__(
        self,
        store: WatchedStore,
        dice: random.Random,
        *,
        wrote: Callable[[int], None],
        answered: Callable[[], None],
        died: Callable[[], None],
    ) -> None:
        self._store = store
        self._dice = dice
        self._wrote = wrote
        self._answered = answered
        self._died = died
        self._waiting: list[Work] = []
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self._trouble = ""
        self.dead = False

    def submit(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(Work(run, future))
        self._next()
        return future

    def read(self, run: Callable[[Books], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(None, self._read, run)

    def _read(self, run: Callable[[Books], T]) -> T:
        with self._store.reading() as books:
            return run(books)

    def require_writable(self) -> None:
        """Raises: ReadOnlyError: the last commit failed."""
        if self._trouble:
            raise ReadOnlyError(self._trouble)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._busy

    def _next(self) -> None:
        if not self._busy and self._waiting and not self.dead:
            self._busy = True
            self._loop.call_later(self._dice.uniform(0.0, SLOWEST_WRITE), self._write_next)

    def _write_next(self) -> None:
        group, self._waiting = self._waiting[:LARGEST_GROUP], self._waiting[LARGEST_GROUP:]
        self._write(group)

    def _write(self, group: list[Work]) -> None:
        if self.dead:
            return
        try:
            outcomes = commit(self._store, group)
        except StoreError as error:
            self._trouble = str(error)
            self._loop.call_later(RETRY_SECONDS, self._write, group)
        except DiedError:
            self._died()
        else:
            self._trouble = ""
            self._wrote(len(group))
            self._loop.call_later(self._dice.uniform(0.0, SLOWEST_ANSWER), self._answer, group, outcomes)

    def _answer(self, group: list[Work], outcomes: list[Outcome]) -> None:
        if self.dead:
            return
        self._busy = False
        self._answered()
        answer(group, outcomes)
        self._next()
