"""Nodes that come and go, as a trainer sees them: real supervisors on a real hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_fakes import wait_until
from server_processes import Child, closing, start_hub, start_with_fake_workers

from distensor.comm import HubClient
from distensor.comm.identity import new_key_and_csr
from distensor.core import DRIVER_RANK, ParallelConfig
from distensor.core.control import JobSpec, JobState, Mesh
from distensor.core.ids import JobId, NodeId
from distensor.hub.machine import Patience

NAMES = ("alpha", "beta", "gamma")
SLOTS = 2


class Cluster:
    """A hub and a supervisor for each name, which can be killed and started again on the same state."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        hub = stack.enter_context(closing(start_hub(directory, tokens=len(NAMES))))
        ready = hub.line()
        self._tokens = dict(zip(NAMES, ready["node_tokens"], strict=True))
        self.client = stack.enter_context(HubClient(ready["trainer_token"]))
        self.nodes = {name: self.start(name) for name in NAMES}
        self.until(lambda mesh: sum(node.connected for node in mesh.nodes) == len(NAMES), "all nodes are there", 20)

    def start(self, name: str) -> Child:
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        started = start_with_fake_workers(folder, token=self._tokens[name], name=name)
        return self._stack.enter_context(closing(started))

    def until(self, condition: Callable[[Mesh], bool], what: str, seconds: float) -> Mesh:
        seen: list[Mesh] = []

        def look() -> bool:
            seen.append(self.client.query_mesh())
            return condition(seen[-1])

        wait_until(look, what, seconds)
        return seen[-1]

    def place(self, replicas: int) -> None:
        """Ask for so many ranks and give them back."""
        csr = new_key_and_csr(JobId("j_new"), None, DRIVER_RANK)[1]
        parallel = ParallelConfig(data_parallel=replicas)
        spec = JobSpec(submission=f"s{replicas}", name="job", parallel=parallel, csr_pem=csr)
        job_id, _ = self.client.submit_job(spec)
        self.client.end_job(job_id, JobState.CANCELLED, "only tried")


@pytest.fixture
def cluster(short_dir: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(short_dir, stack)


def ids(mesh: Mesh) -> dict[str, NodeId | None]:
    return {node.info.name: node.info.node_id for node in mesh.nodes}


def test_a_killed_node_leaves_the_mesh_and_comes_back_as_itself(cluster: Cluster) -> None:
    """TOP-07: no ghost holds a place, and a restart is the same row with the same id, not one more."""
    before = cluster.client.query_mesh()
    assert before.available_workers == SLOTS * len(NAMES)
    cluster.nodes["beta"].kill()
    patience = Patience()
    gone = cluster.until(
        lambda mesh: mesh.available_workers == SLOTS * (len(NAMES) - 1),
        "the killed node's workers are no longer counted",
        patience.heartbeat * patience.silent_heartbeats,
    )
    assert {node.info.name: node.connected for node in gone.nodes} == {"alpha": True, "beta": False, "gamma": True}
    cluster.place(SLOTS * (len(NAMES) - 1))
    cluster.start("beta")
    back = cluster.until(lambda mesh: mesh.available_workers == SLOTS * len(NAMES), "it is back", 20)
    assert ids(back) == ids(before)
    assert len(back.nodes) == len(NAMES)
    cluster.place(SLOTS * len(NAMES))
