"""Processes in one gloo group, which run functions of the test modules."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

START_S = 60.0
GROUP_TIMEOUT_S = 20.0


class RemoteError(AssertionError):
    """A process's function raised; the text is its traceback."""


class GroupPool:
    """`size` processes; each call runs one function on all of them at once."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # The server imports once and has no threads; its children start in milliseconds.
        context.set_forkserver_preload(["distensor.core.distributed", "torch.distributed.tensor"])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, rank, size), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        port = self._answers(self.pipes[:1], START_S)[0]
        for pipe in self.pipes[1:]:
            pipe.send(port)
        self._answers(self.pipes, START_S)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """The results of `function(rank, *arguments)` by rank; raises what a process raised."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        return self._answers(self.pipes, timeout)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe in self.pipes:
            pipe.close()

    def _answers(self, pipes: list[Connection], timeout: float) -> list[Any]:
        """All answers are taken before the first error is raised, so that the pool stays in step."""
        answers = [pipe.recv() if pipe.poll(timeout) else (False, "no answer in time") for pipe in pipes]
        for rank, (ok, value) in enumerate(answers):
            if not ok:
                raise RemoteError(f"rank {rank}: {value}")
        return [value for _, value in answers]


def _main(pipe: Connection, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    port = 0
    if rank > 0:
        port = pipe.recv()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout, wait_for_workers=False)
    if rank == 0:
        pipe.send((True, store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    pipe.send((True, None))
    while (request := pipe.recv()) is not None:
        function, arguments = request
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:  # noqa: BLE001 - shown by the test
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
