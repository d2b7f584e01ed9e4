"""An event loop whose time is a number: when nobody is ready it jumps to the next moment for which somebody waits.

Two runs of the same program take the same turns in the same order. That also needs sets of tasks and futures in a
fixed order, so both hash by the order of their making and not by their address.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StalledError(RuntimeError):
    """Everybody waits for somebody else, for ever."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the time that it is asked to wait has then passed."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._pass_time(timeout)
        return []


class _Task(asyncio.Task[T]):
    def __init__(self, coroutine: Coroutine[Any, Any, T], *, loop: VirtualLoop, **more: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, **more)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: VirtualLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """`between` is called before each turn of the loop; what it raises ends `run_until_complete`.

    Raises:
        StalledError: from `run_until_complete`, when nothing is left that could happen.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self._virtual = 0.0
        self.numbers = itertools.count(1)
        self.between = between
        super().__init__(_Jump(self._pass_time))
        self.set_task_factory(_make_task)  # type: ignore[arg-type]  # the stubs know no extra arguments

    def time(self) -> float:
        return self._virtual

    def _pass_time(self, timeout: float | None) -> None:
        self.between()
        if timeout is None:
            raise StalledError(f"at {self._virtual:.3f} s nothing is left to happen")
        self._virtual += max(0.0, timeout)

    def finish(self) -> None:
        """Cancel whoever is left, and close."""
        self.between = lambda: None
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # wider than the stubs say
        """Run it here and now: a thread would come back when it likes."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # it belongs to who awaits the future
            future.set_exception(error)
        return future


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **more: Any) -> asyncio.Task[T]:
    assert isinstance(loop, VirtualLoop)
    return _Task(coroutine, loop=loop, **more)


class PartyClock:
    """The clock of one party, a `distensor.core.clock.Clock`: its wall time jumps, its durations do not notice."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wall: float, since_boot: float) -> None:
        self._loop = loop
        self._wall = wall
        self._booted = since_boot - loop.time()

    def now(self) -> float:
        return self._wall + self._loop.time()

    def monotonic(self) -> float:
        return self._booted + self._loop.time()

    def since_boot(self) -> float:
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"sleep({seconds}) would block the whole simulation")

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._wall += seconds

    def reboot(self, since_boot: float) -> None:
        """Durations begin anew, as after a start of the machine."""
        self._booted = since_boot - self._loop.time()
