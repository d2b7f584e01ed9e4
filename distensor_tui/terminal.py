"""The terminal around the dashboard: signals end it cleanly, and a terminal that is gone cannot hang it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver

from distensor_tui.app import Dashboard

GONE_EXIT_CODE = 129


class ForgivingFile:
    """A terminal file whose writes may fail for ever once the terminal is gone (EIO, EPIPE).

    Textual writes from a thread of its own; an exception there would end the thread, fill its queue and block the
    app for good.
    """

    def __init__(self, file: IO[str], gone: Callable[[], None]) -> None:
        self._file, self._gone, self._broken = file, gone, False

    def write(self, text: str) -> int:
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()

    def _try(self, action: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            action()
        except (OSError, ValueError):
            self._broken = True
            self._gone()


class SafeDriver(LinuxDriver):
    """Textual's driver on standard output, with a forgiving file."""

    def __init__(self, app: Dashboard, **options: Any) -> None:  # the base class names these loosely
        super().__init__(app, **options)
        loop = asyncio.get_running_loop()
        assert sys.__stdout__ is not None, "the dashboard is only run on a terminal"
        forgiving = ForgivingFile(sys.__stdout__, lambda: _from_thread(loop, app))
        self._file = forgiving  # type: ignore[assignment]  # the base class wants a whole TextIOWrapper


def _from_thread(loop: asyncio.AbstractEventLoop, app: Dashboard) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(app.exit, GONE_EXIT_CODE)


def run(app: Dashboard) -> int:
    """Show the app on this terminal until it is quit or a signal comes; the terminal is restored in any case."""
    code = asyncio.run(_run(app))
    return app.return_code or 0 if code is None else code


async def _run(app: Dashboard) -> int | None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, app.exit, 128 + number)
    return await app.run_async()
