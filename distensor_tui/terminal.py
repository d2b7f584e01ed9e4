"""The terminal around the dashboard: signals end it cleanly, and a terminal that is gone cannot hang it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import sys
import threading
from codecs import getincrementaldecoder
from collections.abc import Callable
from typing import IO, Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

from distensor_tui.app import Dashboard

GONE_EXIT_CODE = 129
ONE_RETURN_S = 0.5
"""SIGCONT comes with every return, also with one that has been dealt with just now."""
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
    """Textual's driver on standard output: a forgiving file, an input thread that can be woken, job control.

    Textual's own thread notices the end only between two waits of 0.1 s, and takes a terminal that is gone for a bug.
    Its handlers of SIGTSTP and SIGCONT write from within the signal, where a lock may be held, stop a program that no
    shell can start again, and after a SIGSTOP take the raw terminal for the one to restore: here are others.
    """

    def __init__(self, app: Dashboard, **options: Any) -> None:  # the base class names these loosely
        super().__init__(app, **options)
        loop = asyncio.get_running_loop()
        assert sys.__stdout__ is not None, "the dashboard is only run on a terminal"
        self._gone: Callable[[], None] = lambda: _from_thread(loop, app)
        forgiving = ForgivingFile(sys.__stdout__, self._gone)
        self._file = forgiving  # type: ignore[assignment]  # the base class wants a whole TextIOWrapper
        self._woken, self._waker = os.pipe()
        self._loop = loop
        self._back_at = float("-inf")
        loop.add_signal_handler(signal.SIGTSTP, self._on_suspend)
        loop.add_signal_handler(signal.SIGCONT, self._on_continue)

    def _on_suspend(self) -> None:
        """Give the terminal back and stop; on the way back take it again.

        By the signal's own default, for the kernel leaves it out where no shell could ever continue us.
        """
        self.suspend_application_mode()
        self._loop.remove_signal_handler(signal.SIGTSTP)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._on_suspend)
        self._come_back()

    def _on_continue(self) -> None:
        """Stopped without a warning: whoever had the terminal meanwhile has changed its settings and its screen."""
        if not self._drawing or self._loop.time() - self._back_at >= ONE_RETURN_S:
            self._come_back()

    def _come_back(self) -> None:
        """In the background this comes to nothing, and the process is stopped: it is tried again when it continues."""
        if self._drawing:
            self.suspend_application_mode()
        self.resume_application_mode()
        self._back_at = self._loop.time()

    @property
    def _drawing(self) -> bool:
        return self._writer_thread is not None and self._writer_thread.is_alive()

    def suspend_application_mode(self) -> None:
        """Unlike at the end, the pipe stays: the input thread is started again."""
        self.stop_application_mode()
        super().close()

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


def run(app: Dashboard, *, mouse: bool = True) -> int:
    """Show the app on this terminal until it is quit or a signal comes; the terminal is restored in any case."""
    code = asyncio.run(_run(app, mouse=mouse))
    gc.freeze()  # nothing is left to collect for: the process ends, 60 ms sooner without a last search for cycles
    if code == GONE_EXIT_CODE:
        _forget_output()
    return app.return_code or 0 if code is None else code


def _forget_output() -> None:
    """What is still buffered for a terminal that is gone must not become an error at exit."""
    assert sys.__stdout__ is not None
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - not a path of ours
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno())


async def _run(app: Dashboard, *, mouse: bool) -> int | None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, app.exit, 128 + number)
    return await app.run_async(mouse=mouse)
