"""Real processes with a data plane between them, which run functions of the test modules."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from transport_kit import QUICK, Authority, peer

from distensor.transport import DataPlane, Listener, Timeouts

_START = 60.0


@dataclass(frozen=True, slots=True)
class Here:
    """What a function that runs in a worker gets first."""

    rank: int
    size: int
    plane: DataPlane


class RemoteError(AssertionError):
    """A worker's function raised; the text is its traceback."""


class WorkerPool:
    """`size` workers; each call runs one function on all of them (or some) at once."""

    def __init__(self, size: int, *, timeouts: Timeouts = QUICK, group_timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server imports once and has no threads; its children start in milliseconds.
        context.set_forkserver_preload(["distensor.transport.c10d", "distensor.sync.gradients", "cryptography.x509"])
        authority = Authority()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, rank, size, timeouts, group_timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        addresses = [self._take(rank, _START) for rank in range(size)]
        for rank, pipe in enumerate(self._pipes):
            pipe.send((dict(enumerate(addresses)), authority.place(rank)))
        for rank in range(size):
            self._take(rank, _START)

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None, timeout: float = 60.0
    ) -> list[Any]:
        """The results of `function(here, *arguments)` by rank; raises what a worker raised."""
        self.start(function, *arguments, ranks=ranks)
        return self.results(ranks, timeout)

    def start(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        for rank in self._of(ranks):
            self._pipes[rank].send((function, arguments))

    def results(self, ranks: Sequence[int] | None = None, timeout: float = 60.0) -> list[Any]:
        """All answers are taken before the first error is raised, so that the pool stays in step."""
        answers = [self._take_raw(rank, timeout) for rank in self._of(ranks)]
        for ok, value in answers:
            if not ok:
                raise RemoteError(value)
        return [value for _, value in answers]

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, signal_number)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    continue
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe in self._pipes:
            pipe.close()

    def _of(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._pipes)) if ranks is None else ranks

    def _take(self, rank: int, timeout: float) -> Any:
        ok, value = self._take_raw(rank, timeout)
        if not ok:
            raise RemoteError(value)
        return value

    def _take_raw(self, rank: int, timeout: float) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(timeout):
            return False, f"rank {rank} did not answer within {timeout} s"
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except EOFError:
            return False, f"rank {rank} is gone"
        return answer


@contextmanager
def worker_pool(size: int, **options: Any) -> Iterator[WorkerPool]:
    pool = WorkerPool(size, **options)
    try:
        yield pool
    finally:
        pool.close()


def _main(pipe: Connection, rank: int, size: int, timeouts: Timeouts, group_timeout: float) -> None:
    import torch

    torch.set_num_threads(1)
    from distensor.transport import c10d

    listener = Listener.bind("127.0.0.1")
    pipe.send((True, listener.address))
    addresses, credentials = pipe.recv()
    with DataPlane.open(peer(rank), credentials, listener, addresses, timeouts=timeouts, driver=False) as plane:
        c10d.init_process_group(plane, rank, size, timedelta(seconds=group_timeout))
        pipe.send((True, None))
        _serve(pipe, Here(rank, size, plane))
        c10d.destroy_process_group()
    listener.close()


def _serve(pipe: Connection, here: Here) -> None:
    while (request := _next_request(pipe)) is not None:
        function, arguments = request
        try:
            answer = (True, function(here, *arguments))
        except BaseException:  # noqa: BLE001 - shown by the test
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _next_request(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None
