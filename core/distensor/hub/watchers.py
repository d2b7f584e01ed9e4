"""Those who watch jobs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from distensor.core.control import JobUpdate
from distensor.core.errors import AuthenticationError
from distensor.core.ids import JobId


class Watcher:
    """One who watches. When behind, it gets the newest state, not every one."""

    def __init__(self) -> None:
        self._newest: JobUpdate | None = None
        self._ended: str | None = None
        self._woken = asyncio.Event()

    def put(self, update: JobUpdate) -> None:
        self._newest = update  # an update is the whole state: the newer one says everything
        self._woken.set()

    def end(self, why: str) -> None:
        """Whoever watches may do so no longer."""
        self._ended = why
        self._woken.set()

    async def next(self, *, within: float) -> JobUpdate | None:
        """The next update, or None when there is none within these seconds.

        Raises:
            AuthenticationError: `end` was called.
        """
        try:
            async with asyncio.timeout(within):
                await self._woken.wait()
        except TimeoutError:
            return None
        self._woken.clear()
        if self._ended is not None:
            raise AuthenticationError(self._ended)
        update, self._newest = self._newest, None
        return update


class Watchers:
    """All of them, by job."""

    def __init__(self) -> None:
        self._of_job: defaultdict[JobId, set[Watcher]] = defaultdict(set)

    @contextmanager
    def watch(self, job_id: JobId) -> Iterator[Watcher]:
        watcher = Watcher()
        self._of_job[job_id].add(watcher)
        try:
            yield watcher
        finally:
            self._of_job[job_id].discard(watcher)
            if not self._of_job[job_id]:
                del self._of_job[job_id]

    def count(self, job_id: JobId) -> int:
        """How many watch the job now."""
        return len(self._of_job.get(job_id, ()))

    def publish(self, update: JobUpdate) -> None:
        for watcher in self._of_job.get(update.job_id, ()):
            watcher.put(update)
