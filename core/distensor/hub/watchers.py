"""Those who watch jobs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from distensor.core.control import JobUpdate
from distensor.core.ids import JobId


class Watchers:
    """A queue for each watcher of a job. A watcher that is behind gets the newest state, not every one."""

    def __init__(self) -> None:
        self._queues: defaultdict[JobId, set[asyncio.Queue[JobUpdate]]] = defaultdict(set)

    @contextmanager
    def watch(self, job_id: JobId) -> Iterator[asyncio.Queue[JobUpdate]]:
        queue: asyncio.Queue[JobUpdate] = asyncio.Queue(maxsize=1)
        self._queues[job_id].add(queue)
        try:
            yield queue
        finally:
            self._queues[job_id].discard(queue)
            if not self._queues[job_id]:
                del self._queues[job_id]

    def count(self, job_id: JobId) -> int:
        """How many watch the job now."""
        return len(self._queues.get(job_id, ()))

    def publish(self, update: JobUpdate) -> None:
        for queue in self._queues.get(update.job_id, ()):
            if queue.full():
                queue.get_nowait()  # an update is the whole state: the newer one says everything
            queue.put_nowait(update)
