"""The terminal around the dashboard: signals end it cleanly, and a terminal that is gone cannot hang it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import IO, Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

from distensor_tui.app import Dashboard

GONE_EXIT_CODE = 129
ESCAPE_WAIT_S = 0.1
"""After this silence a lone Esc is the Esc key, not the begin of a sequence."""


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
    """Textual's driver on standard output, with a forgiving file and an input thread that can be woken.

    Textual's own thread notices the end only between two waits of 0.1 s, and takes a terminal that is gone for a bug.
    """

    def __init__(self, app: Dashboard, **options: Any) -> None:  # the base class names these loosely
        super().__init__(app, **options)
        loop = asyncio.get_running_loop()
        assert sys.__stdout__ is not None, "the dashboard is only run on a terminal"
        self._gone: Callable[[], None] = lambda: _from_thread(loop, app)
        forgiving = ForgivingFile(sys.__stdout__, self._gone)
        self._file = forgiving  # type: ignore[assignment]  # the base class wants a whole TextIOWrapper
        self._woken, self._waker = os.pipe()

    def run_input_thread(self) -> None:
        """Read keys until woken by `disable_input`."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            ready, _, _ = select.select([self.fileno, self._woken], [], [], ESCAPE_WAIT_S)
            if self._woken in ready:
                return
            if ready and not self._feed(parser, decode):
                self._gone()
                return
            for event in parser.tick():
                self.process_message(event)

    def _feed(self, parser: XTermParser, decode: Callable[[bytes], str]) -> bool:
        """Hand on what was typed; False when there is no terminal any more."""
        try:
            data = os.read(self.fileno, 4096)
        except OSError:
            return False
        for event in parser.feed(decode(data)) if data else ():
            self.process_message(event)
        return bool(data)

    def disable_input(self) -> None:
        os.write(self._waker, b"x")
        super().disable_input()

    def start_application_mode(self) -> None:
        """Also after a suspension: what woke the last input thread must not end the next one."""
        os.set_blocking(self._woken, False)
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 64)
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        super().close()
        os.close(self._woken)
        os.close(self._waker)


def _from_thread(loop: asyncio.AbstractEventLoop, app: Dashboard) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(app.exit, GONE_EXIT_CODE)


def run(app: Dashboard) -> int:
    """Show the app on this terminal until it is quit or a signal comes; the terminal is restored in any case."""
    code = asyncio.run(_run(app))
    gc.freeze()  # nothing is left to collect for: the process ends, 60 ms sooner without a last search for cycles
    if code == GONE_EXIT_CODE:
        _forget_output()
    return app.return_code or 0 if code is None else code


def _forget_output() -> None:
    """What is still buffered for a terminal that is gone must not become an error at exit."""
    assert sys.__stdout__ is not None
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - not a path of ours
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno())


async def _run(app: Dashboard) -> int | None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, app.exit, 128 + number)
    return await app.run_async()
