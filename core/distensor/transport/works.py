"""`Work` objects of the backend: promises of collectives that run in a group's thread, and of single messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from distensor.core.errors import TransportTimeoutError

_NO_TIMEOUT = timedelta(0)


def seconds_of(timeout: timedelta | None) -> float | None:
    """torch's 'no timeout' is zero or a negative number of milliseconds."""
    return None if timeout is None or timeout <= _NO_TIMEOUT else timeout.total_seconds()


class CollectiveWork(dist.Work):
    """A collective, queued or running or done. `wait` raises the error that ended it."""

    def __init__(self, what: str, outputs: list[Tensor]) -> None:
        super().__init__()
        self._what = what
        self._outputs = outputs
        self._lock = threading.Lock()
        self._done = False
        self._event: threading.Event | None = None
        self._error: BaseException | None = None
        self._future: Future[list[Tensor]] | None = None

    def complete(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = error
            self._done = True
            if self._event is not None:
                self._event.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        seconds = seconds_of(timeout)
        if not self._done and not self._waiting().wait(seconds):
            raise TransportTimeoutError(f"{self._what} is not done after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def _waiting(self) -> threading.Event:
        """Made only when somebody waits: what runs in its caller's thread is done before."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self._done:
                    self._event.set()
            return self._event

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        with self._lock:
            created = self._future is None
            if self._future is None:
                self._future = Future()
            future, done = self._future, self._done
        if created and done:
            self._settle(future)
        return future

    def _settle(self, future: Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]  # torch's stub names the wrong type


class MessageWork(dist.Work):
    """One send or receive. It progresses when somebody waits for it, in whatever order they wait."""

    def __init__(self, run: Callable[[float | None], None], ready: Callable[[], bool], source: int = -1) -> None:
        super().__init__()
        self._run = run
        self._ready = ready
        self._source = source
        self._lock = threading.Lock()
        self._finished = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        with self._lock:
            if not self._finished:
                self._run(seconds_of(timeout))
                self._finished = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._finished or self._ready()

    def is_success(self) -> bool:
        return self.is_completed()

    def source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()

        def settle() -> None:
            try:
                self.wait()
            except BaseException as error:  # noqa: BLE001 - it is the future's outcome
                future.set_exception(error)
            else:
                future.set_result([])

        threading.Thread(target=settle, name="distensor-p2p-future", daemon=True).start()
        return future
