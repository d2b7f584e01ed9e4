"""A worker never outlives its supervisor: end of input on stdin, and on Linux the kernel's own signal."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from distensor.core.errors import ConfigError
from distensor.node.ipc import ExitCode, parse_line

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the Linux kernel to kill this process when its parent ends. Elsewhere stdin alone has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def follow_stdin(stream: TextIO, on_message: Callable[[dict[str, object]], None]) -> threading.Thread:
    """Read the supervisor's messages in a thread; end the process at once when the stream ends.

    The exit skips clean-up on purpose: torch and its threads may be anywhere, and nothing of a worker is worth
    keeping once nobody watches over it.
    """

    def read() -> None:
        for line in stream:
            try:
                on_message(parse_line(line))
            except ConfigError as error:
                sys.stderr.write(f"{error}\n")
                os._exit(ExitCode.BAD_ASSIGNMENT)
        sys.stderr.flush()
        os._exit(ExitCode.DONE)

    thread = threading.Thread(target=read, name="stdin", daemon=True)
    thread.start()
    return thread
