"""What our commands have in common: how a wrong command line ends, and how a command that serves is told to end."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
from typing import NoReturn

USAGE = 64
"""Exit status of a wrong command line, as in sysexits.h."""


class UsageParser(argparse.ArgumentParser):
    """Says what is wrong and where help is, and ends with 64 instead of argparse's 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


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
