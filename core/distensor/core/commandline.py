"""What our commands have in common: how a wrong command line ends, and how a command that serves is told to end."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

from distensor.core.errors import AuthenticationError, ConfigError, ControlError, DistensorError, StoreError


class Exit(IntEnum):
    """Exit statuses, as in sysexits.h."""

    OK = 0
    USAGE = 64
    UNAVAILABLE = 69
    CANNOT_READ = 74
    NO_PERMISSION = 77


_STATUSES: tuple[tuple[type[DistensorError], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (AuthenticationError, Exit.NO_PERMISSION),
    (StoreError, Exit.CANNOT_READ),
    (ControlError, Exit.UNAVAILABLE),
)


def status_of(prog: str, run: Callable[[], int]) -> int:
    """What `run` returns, or the status of the error that it ends with, which is one line on standard error.

    Raises:
        DistensorError: one that no status of a command stands for.
    """
    try:
        return run()
    except SystemExit as exit_:  # argparse ends this way, after --help too
        return int(exit_.code or 0)
    except tuple(kind for kind, _ in _STATUSES) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return next(status for kind, status in _STATUSES if isinstance(error, kind))


class UsageParser(argparse.ArgumentParser):
    """Says what is wrong and where help is, and ends with 64 instead of argparse's 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


def stop_when_told(stop: asyncio.Event, *, with_stdin: bool) -> None:
    """Set `stop` at SIGTERM and SIGINT, and with `with_stdin` at the end of standard input. Called in the loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if with_stdin:
        threading.Thread(target=_wait_for_stdin, args=(loop, stop), daemon=True).start()


def _wait_for_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock, held by this thread, would abort the interpreter's end
        pass
    loop.call_soon_threadsafe(stop.set)
