"""One worker process: started by exec, talked to over its pipes, ended with its whole group.

How a worker ends with its supervisor, also when that is killed with SIGKILL:

- the worker reads its stdin all the time; end of input means exit at once, on every system and at any moment,
  because the kernel closes the pipe whatever the supervisor died of;
- on Linux it also asks for PR_SET_PDEATHSIG as the first thing it does, so that one whose threads are stuck dies too;
- what is left of its process group is ended by a guard (guard.py), which outlives the supervisor for that;
- what escapes all of these is found by the mark in its environment and ended at the next start (orphans.py).

The worker asks for the signal itself because the alternatives cost more than they give: `preexec_fn` runs Python
between fork and exec, which is unsafe beside the threads of grpc, and a launcher is one more interpreter start for
each worker. Without `preexec_fn`, `subprocess` uses vfork, and no fork handler of grpc ever runs. If the supervisor
dies before the worker has asked, end of input is there when the worker first reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from distensor_server.lines import LineSplitter, Oversize
from distensor_server.logfiles import LastLine, RotatingFile
from distensor_server.messages import MAX_LINE

LAST_WORDS_SECONDS = 0.5
"""How long after its end a worker's pipes are read. Only a descendant that left the group can hold them longer."""


class WorkerProcess(asyncio.SubprocessProtocol):
    """Create with `start`. `on_line` and `on_end` are called in the event loop; `on_end` exactly once, last."""

    def __init__(
        self,
        log: RotatingFile,
        on_line: Callable[[bytes | Oversize], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._log = log
        self._on_line = on_line
        self._on_end = on_end
        self._splitter = LineSplitter(MAX_LINE)
        self._errors = LastLine()
        self._open_pipes = {1, 2}
        self._transport: asyncio.SubprocessTransport | None = None
        self._code: int | None = None
        self._finished = False

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        on_line: Callable[[bytes | Oversize], None],
        on_end: Callable[[int], None],
    ) -> WorkerProcess:
        """Raises OSError when the program cannot be started or its log cannot be opened."""
        log = RotatingFile(log_path)
        loop = asyncio.get_running_loop()
        try:
            _, process = await loop.subprocess_exec(
                lambda: cls(log, on_line, on_end),
                *command,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError:
            log.close()
            raise
        return process

    @property
    def pid(self) -> int:
        assert self._transport is not None
        return self._transport.get_pid()

    @property
    def last_error_line(self) -> str:
        return self._errors.text

    def send(self, line: bytes) -> None:
        pipe = self._stdin()
        if pipe is not None and not pipe.is_closing():
            pipe.write(line)

    def close_stdin(self) -> None:
        pipe = self._stdin()
        if pipe is not None:
            pipe.close()

    def kill(self) -> None:
        """SIGKILL to the group: the worker and all that it started. Nothing once it has ended: ids are reused."""
        if self._code is None:
            self._kill_group()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Called with a SubprocessTransport, whatever the base class says.
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        chunk = data if isinstance(data, bytes) else data.encode()
        if fd == 2:
            self._errors.feed(chunk)
            self._log.write(chunk)
            return
        for line in self._splitter.feed(chunk):
            self._on_line(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if not self._open_pipes and self._code is not None:
            self._finish()

    def process_exited(self) -> None:
        assert self._transport is not None
        # The group still holds what the worker started; its id cannot have been reused in this instant.
        self._kill_group()
        code = self._transport.get_returncode()
        self._code = code if code is not None else -signal.SIGKILL
        if self._open_pipes:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        assert self._transport is not None
        assert self._code is not None
        self._transport.close()
        self._log.close()
        self._on_end(self._code)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _stdin(self) -> asyncio.WriteTransport | None:
        if self._transport is None:
            return None
        return cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))
