"""The thread that runs a group's collectives, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from distensor.core.errors import DistensorError, PeerLostError, TransportError
from distensor.transport.exchange import Exchange
from distensor.transport.works import CollectiveWork

Job = tuple[CollectiveWork, Callable[[Exchange], None]]


class GroupThread:
    """Runs jobs in order. After one failed the group is out of step, so every later one fails with the same cause."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange = exchange
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._pending = 0
        self._broken: BaseException | None = None
        self._stopped = False

    def submit(self, work: CollectiveWork, run: Callable[[Exchange], None], *, at_once: bool) -> None:
        """Queue a job; or run it here, if the caller is going to wait for it anyway and nothing is before it."""
        with self._lock:
            if self._stopped:
                raise TransportError(f"group {self._name} is destroyed; it runs no more collectives")
            here = at_once and self._pending == 0
            self._pending += 1
            if here:
                self._running.acquire()
            else:
                self._start()
                self._jobs.put((work, run))
        if here:
            try:
                with torch.no_grad():
                    self._run(work, run)
            finally:
                self._running.release()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=f"distensor-group-{self._name}", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Run what is queued, then end. Does not wait."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._jobs.put(None)

    def join(self, timeout: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _loop(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                with self._running:
                    self._run(*job)
                del job  # its tensors must not live until the next one comes

    def _run(self, work: CollectiveWork, run: Callable[[Exchange], None]) -> None:
        if self._broken is None:
            try:
                run(self._exchange)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the work
                self._broken = error
                self._exchange.give_up(error)
        with self._lock:
            self._pending -= 1
        work.complete(None if self._broken is None else again(self._broken))
        if self._broken is not None and not isinstance(self._broken, Exception):
            raise self._broken  # an interrupt of the caller's thread is his, too


def again(cause: BaseException) -> BaseException:
    """The error for one more collective of a group that failed before: same kind, same words, own traceback."""
    error: BaseException
    if isinstance(cause, PeerLostError):
        error = PeerLostError(cause.rank, cause.reason)
    elif isinstance(cause, DistensorError):
        error = type(cause)(str(cause))
    else:
        error = TransportError(f"a collective failed here: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
