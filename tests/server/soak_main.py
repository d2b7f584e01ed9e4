"""The supervisor of the soak: a real link to a real hub, jobs that come and go without one, workers killed on the way.

argv: one JSON object with `directory`, `worker`, `pause` (seconds between jobs), `metrics_port`. The join token is in
DISTENSOR_JOIN_TOKEN.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server_fakes import NoAccelerators, assignment, certificate, settings_in, topology

from distensor.comm import LinkStatus, NodeLink, NodeLinkHandler
from distensor.core.clock import Clock
from distensor.core.control import NodeInfo, Unit, WorkerChange, WorkerReady, WorkerState
from distensor.core.ids import Epoch, JobId, Rank
from distensor_server.lifecycle import RestartPolicy
from distensor_server.supervisor import Supervisor

RANKS = (0, 1)
KILL_EVERY = 3
POLICY = RestartPolicy(first_delay=0.1, stop_grace=2.0)


class ChurningLink:
    """Heartbeats go to the hub; reports and claims are of jobs that it does not know, so they stay here."""

    def __init__(self, real: NodeLink, handler: NodeLinkHandler, *, pause: float) -> None:
        self._real = real
        self._handler = handler
        self._pause = pause
        self._states: dict[Rank, WorkerState] = {}
        self._changed = asyncio.Event()
        self.unanswered_claims = 0
        self.pid_of: Callable[[Rank], int | None] = lambda _rank: None

    @property
    def status(self) -> LinkStatus:
        return self._real.status

    def set_accepting(self, accepting: bool) -> None:
        self._real.set_accepting(accepting)

    def wake(self) -> None:
        self._real.wake()

    def claim(self, unit: Unit) -> None:
        pass

    def report(self, report: WorkerReady | WorkerChange) -> None:
        if isinstance(report, WorkerChange):
            self._states[report.rank] = report.state
            self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._real.run())
            group.create_task(self._churn())

    async def _churn(self) -> None:
        number = 0
        while True:
            number += 1
            await self._job(number)
            await asyncio.sleep(self._pause)

    async def _job(self, number: int) -> None:
        job = f"j_{number}"
        self._states.clear()
        for rank in RANKS:
            self._handler.on_assignment(assignment(rank, job=job))
        await self._all(WorkerState.READY)
        self._handler.on_topology(topology(job=job), [certificate(rank) for rank in RANKS])
        await self._all(WorkerState.RUNNING)
        if number % KILL_EVERY == 0:
            pid = self.pid_of(Rank(1))
            assert pid is not None
            del self._states[Rank(1)]
            os.kill(pid, signal.SIGKILL)
            await self._until(lambda: self._states.get(Rank(1)) is WorkerState.READY)
        self._handler.on_release(JobId(job), Epoch(1), "finished")
        await self._all(WorkerState.EXITED)

    async def _all(self, state: WorkerState) -> None:
        await self._until(lambda: all(self._states.get(Rank(rank)) is state for rank in RANKS))

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def _make_link(made: list[ChurningLink], token: str, pause: float) -> Callable[..., ChurningLink]:
    def make(
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[Any]],
        handler: NodeLinkHandler,
        clock: Clock,
    ) -> ChurningLink:
        real = NodeLink(token, credential_path, describe, list, handler, clock)
        made.append(ChurningLink(real, handler, pause=pause))
        return made[0]

    return make


async def main(options: dict[str, Any]) -> None:
    made: list[ChurningLink] = []
    supervisor = Supervisor(
        settings_in(
            Path(options["directory"]),
            log_bytes=50_000,
            overrides={"cpu_workers": 2, "metrics_port": options["metrics_port"]},
        ),
        make_link=_make_link(made, os.environ.pop("DISTENSOR_JOIN_TOKEN"), options["pause"]),
        worker_command=options["worker"],
        detector=NoAccelerators(),
        policy=POLICY,
        announce=lambda message: print(json.dumps(dict(message)), flush=True),
    )
    made[0].pid_of = lambda rank: next(
        worker.pid
        for worker in reversed(supervisor.node.workforce.workers)
        if worker.assignment.rank == rank and worker.pid
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop_by_signal, "SIGTERM")
    await supervisor.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, handlers=[logging.NullHandler()])
    asyncio.run(main(json.loads(sys.argv[1])))
