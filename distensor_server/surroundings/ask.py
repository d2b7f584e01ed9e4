"""A short question to a program of the system, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from distensor.core.reading import Reading, Unavailable
from distensor_server.environment import scrubbed

SECONDS = 3.0

Ask: TypeAlias = Callable[[Sequence[str]], Awaitable[Reading[str]]]
"""What the command wrote, or why there is no answer."""

_SESSION_BUS = ("DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")


async def ask(command: Sequence[str], *, seconds: float = SECONDS) -> Reading[str]:
    """Run `command`; it sees the session's bus, and nothing secret."""
    bus = {name: os.environ[name] for name in _SESSION_BUS if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=scrubbed(os.environ, bus),
        )
    except OSError as error:
        return Unavailable(reason=f"{command[0]}: {error.strerror}")
    try:
        out, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        return Unavailable(reason=f"{command[0]} did not answer within {seconds:g} s")
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        return Unavailable(reason=f"{command[0]} ended with {process.returncode}")
    return out.decode("utf-8", "replace")
