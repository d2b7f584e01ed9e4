"""A supervisor in a process of its own, with fake workers: what the tests that kill supervisors start.

argv: one JSON object with `directory`, `token` (null: no hub, the job is assigned at once), `worker`, `ranks`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from server_fakes import FakeLink, NoAccelerators, assignment, certificate, settings_in, topology

from distensor.comm import NodeLinkHandler
from distensor.core.clock import Clock
from distensor.core.control import NodeInfo, WorkerChange, WorkerReady
from distensor_server.hublink import HubLink, link_with
from distensor_server.lifecycle import RestartPolicy
from distensor_server.supervisor import Supervisor

POLICY = RestartPolicy(first_delay=0.2, stop_grace=1.0)


class AssigningLink(FakeLink):
    """A hub that assigns `ranks` as soon as it is connected and grants a topology when all are ready."""

    ranks: Sequence[int] = ()

    async def run(self) -> None:
        self.ready: set[int] = set()
        running = asyncio.create_task(super().run())
        await asyncio.sleep(0)
        for rank in self.ranks:
            self.handler.on_assignment(assignment(rank, ranks=max(2, len(self.ranks))))
        await running

    def report(self, report: WorkerReady | WorkerChange) -> None:
        super().report(report)
        if isinstance(report, WorkerReady):
            self.ready.add(report.rank)
            if self.ready == set(self.ranks):
                self.handler.on_topology(
                    topology(ranks=max(2, len(self.ranks))), [certificate(rank) for rank in self.ranks]
                )


def assigning(ranks: Sequence[int]) -> Callable[..., HubLink]:
    def make(
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[Any]],
        handler: NodeLinkHandler,
        clock: Clock,
    ) -> HubLink:
        link = AssigningLink(describe, running, handler)
        link.ranks = ranks
        return link

    return make


async def main(options: dict[str, Any]) -> None:
    token, ranks = options["token"], options["ranks"]
    supervisor = Supervisor(
        settings_in(Path(options["directory"]), name=options["name"]),
        make_link=link_with(token) if token else assigning(ranks),
        worker_command=options["worker"],
        detector=NoAccelerators(),
        policy=POLICY,
        announce=lambda message: print(json.dumps(dict(message)), flush=True),
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.stop_by_signal, "SIGTERM")
    await supervisor.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(json.loads(sys.argv[1])))
