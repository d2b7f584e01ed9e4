"""A small process that ends the workers' groups when this supervisor dies without doing it itself.

Workers end by themselves when their input does, and on Linux by PR_SET_PDEATHSIG. What a worker started does not: its
children, or on macOS a worker whose threads are stuck, would hold memory until the next start of a supervisor. The
guard is a shell that reads which groups there are; when its input ends, it ends what is left of them, and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

from distensor_server.environment import scrubbed
from distensor_server.feature import Feature
from distensor_server.node import Node

SHELL = "/bin/sh"
SCRIPT = r"""
trap '' HUP INT TERM
groups=' '
while read -r what group; do
    case $what in
        add) groups="$groups$group " ;;
        end) case $groups in *" $group "*) groups="${groups%% $group *} ${groups#* $group }" ;; esac ;;
    esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
exit 0
"""
END_SECONDS = 2.0
AGAIN_SECONDS = 30.0


class Guard(Feature):
    """Keeps one guard running and tells it of every worker's process group."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._groups: set[int] = set()
        self._process: asyncio.subprocess.Process | None = None

    def on_process_started(self, pid: int) -> None:
        self._groups.add(pid)
        self._say(f"add {pid}")

    def on_process_ended(self, pid: int) -> None:
        self._groups.discard(pid)
        self._say(f"end {pid}")

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._run(),)

    async def _run(self) -> None:
        while True:
            try:
                await self._guarded()
            except OSError as error:
                self._node.journal.add("warning", "supervisor", f"no guard for the workers' children: {SHELL}: {error}")
            await self._node.clock.sleep_async(AGAIN_SECONDS)

    async def _guarded(self) -> None:
        """Until the guard ends, which it does not before us unless somebody kills it."""
        process = await asyncio.create_subprocess_exec(
            SHELL,
            "-c",
            SCRIPT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=scrubbed(self._node.environment, {}),
            start_new_session=True,
        )
        self._process = process
        for group in self._groups:
            self._say(f"add {group}")
        try:
            await process.wait()
        finally:
            self._process = None
            await _end(process)
        self._node.journal.add("warning", "supervisor", "the guard of the workers ended: another one is started")

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())


async def _end(process: asyncio.subprocess.Process) -> None:
    """The workers are gone by now, so the end of its input has nothing to do but end it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
