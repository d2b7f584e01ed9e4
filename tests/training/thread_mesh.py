"""A whole mesh inside one process: the real trainer and the real engines, over real planes, a thread for each rank.

No hub, no worker processes: a job of sixteen ranks costs what its planes and its arithmetic cost.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from transport_kit import JOB, Authority, mesh

from distensor.core import (
    DRIVER_RANK,
    SYSTEM_CLOCK,
    DeviceId,
    Epoch,
    Generation,
    NodeId,
    ParallelConfig,
    Rank,
    RankLayout,
)
from distensor.core.control import DeviceKind, Member, Mesh, MeshNode, NodeInfo, Topology
from distensor.node.commands import Commands
from distensor.node.engine import ShardEngine
from distensor.node.faults import Cheat
from distensor.node.groups import make_groups
from distensor.node.ipc import Emitter, WorkerAssignment
from distensor.node.progress import ProgressReporter
from distensor.node.replica_meter import ReplicaMeter
from distensor.node.snapshots import SnapshotServer
from distensor.training.replies import Reply
from distensor.training.snapshot_reading import SnapshotReader
from distensor.transport import DataPlane
from distensor.transport.driver import Command
from distensor.transport.group import TransportGroup

SECONDS = 60.0


def on_ranks(run: Callable[[int], Any], ranks: int, wake: Callable[[], None]) -> list[Any]:
    """`run(rank)` for every rank at once; the first error is raised, and `wake` ends the waiting of the others."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)
            wake()

    threads = [threading.Thread(target=call, args=(rank,), name=f"rank-{rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]


class ThreadConnection:
    """What `JobConnection` is to a job; commands run on engines of this process."""

    job_id, epoch, restarts, exit_reason_seconds = JOB, Epoch(1), 0, 0.0

    def __init__(
        self,
        parallel: ParallelConfig,
        planes: Mapping[int, DataPlane],
        servers: Sequence[SnapshotServer],
        reader: SnapshotReader,
        cheat: Cheat | None = None,
    ) -> None:
        self.planes = planes
        self._cheat = cheat
        self.ranks = range(parallel.world_size)
        self.commands: list[Command] = []
        self._layout = RankLayout(parallel)
        self._groups: list[TransportGroup] = []
        assignments = [self._assignment(parallel, rank) for rank in self.ranks]
        self.engines = [self._engine(assignment) for assignment in assignments]
        self._commands_of = [self._commands(assignment, servers[assignment.rank]) for assignment in assignments]
        self.snapshots = reader

    @property
    def topology(self) -> Topology:
        members = tuple(
            Member(rank=Rank(rank), node_id=NodeId(f"n{rank}"), node_name=f"node {rank}", host="127.0.0.1", port=1)
            for rank in self.ranks
        )
        parallel = self._layout.config
        return Topology(job_id=JOB, job_name="test", epoch=Epoch(1), parallel=parallel, members=members)

    def _assignment(self, parallel: ParallelConfig, rank: int) -> WorkerAssignment:
        return WorkerAssignment(
            job_id=JOB, job_name="test", epoch=Epoch(1), rank=Rank(rank), parallel=parallel,
            device_kind=DeviceKind.CPU, device_id=DeviceId("cpu"), listen_host="127.0.0.1",
            memory_limit=1 << 30, threads=1,
        )  # fmt: skip

    def _engine(self, assignment: WorkerAssignment) -> ShardEngine:
        import torch

        rank, made = assignment.rank, iter(range(1 << 20))

        def new_group(ranks: list[int]) -> TransportGroup | None:
            name = f"{next(made)}"
            if rank not in ranks:
                return None
            plane, me = self.planes[rank], ranks.index(rank)
            group = TransportGroup(plane, ranks, me, name=name, timeout=SECONDS, clock=SYSTEM_CLOCK)
            self._groups.append(group)
            return group

        return ShardEngine(
            assignment=assignment, plane=self.planes[rank], device=torch.device("cpu"), clock=SYSTEM_CLOCK,
            groups=make_groups(self._layout, rank, new_group), cheat=self._cheat,
        )  # fmt: skip

    def _commands(self, assignment: WorkerAssignment, server: SnapshotServer) -> Commands:
        emitter, meter = Emitter(io.StringIO()), ReplicaMeter(self._layout, assignment.rank)
        progress = ProgressReporter(emitter=emitter, clock=SYSTEM_CLOCK, replicas=meter)
        progress.watch(self.planes[assignment.rank])
        commands = Commands(
            assignment=assignment, emitter=emitter, clock=SYSTEM_CLOCK, progress=progress, meter=meter,
            reach=lambda _phase, _step: None,
        )  # fmt: skip
        commands.enter(assignment, self.planes[assignment.rank], server)
        return commands

    def stats(self) -> Mapping[int, Any]:
        return {}

    def bytes_moved(self) -> tuple[int, int]:
        return 0, 0

    def command(
        self,
        command: Command,
        meta: Mapping[str, Any],
        tensors: Mapping[int, Mapping[str, Tensor]] | None = None,
        extra: Mapping[int, Mapping[str, Any]] | None = None,
        most_bytes: Mapping[int, int] | None = None,
        only: Collection[int] | None = None,
    ) -> list[Reply]:
        assert only is None, "all ranks take part while nobody is lost"
        sequence = len(self.commands)
        self.commands.append(command)

        def run(rank: int) -> Reply:
            words = json.loads(json.dumps({**meta, **(extra or {}).get(rank, {})}))
            own = {name: tensor.detach().clone() for name, tensor in (tensors or {}).get(rank, {}).items()}
            answer, results = self._commands_of[rank].run(self.engines[rank], command, sequence, words, own)
            size = sum(tensor.nbytes for tensor in results.values())
            assert size <= (most_bytes or {}).get(rank, 0), f"rank {rank} sends more than was asked for"
            copies = {name: tensor.detach().clone() for name, tensor in results.items()}
            return Reply(rank=rank, who=f"rank {rank}", meta=json.loads(json.dumps(answer)), tensors=copies)

        return on_ranks(run, len(self.ranks), self._wake)

    def _wake(self) -> None:
        for plane in self.planes.values():
            plane.close()

    def end(self, state: Any, reason: str = "") -> None:
        for group in self._groups:
            group.shutdown()


class _Hub:
    def report_units(self, units: Sequence[Any]) -> None: ...

    def object_to(self, units: Sequence[Any]) -> None: ...

    def report_progress(self, job_id: Any, epoch: Any, steps: Sequence[Any]) -> None: ...


def _node(workers: int) -> MeshNode:
    info = NodeInfo(name="threads", host="127.0.0.1", version="0", devices=())
    return MeshNode(info=info, connected=True, free_slots=workers, seconds_since_heartbeat=0.0)


class ThreadSession:
    """What `Session` is to a trainer: every job gets the same planes."""

    clock, client = SYSTEM_CLOCK, _Hub()
    leaves_workers = False

    def __init__(self, planes: Mapping[int, DataPlane]) -> None:
        self.planes = planes
        self.connections: list[ThreadConnection] = []
        # One for all jobs, since they number their requests on the same planes.
        self._servers = [SnapshotServer(planes[rank]) for rank in range(len(planes) - 1)]
        self._reader = SnapshotReader(planes[DRIVER_RANK])
        self.measures: Any = None
        self.cheat: Cheat | None = None

    def query_mesh(self) -> Mesh:
        return Mesh(generation=Generation(1), nodes=(_node(len(self.planes) - 1),))

    def open_job(self, *, parallel: ParallelConfig, **others: Any) -> Any:
        assert parallel.world_size == len(self.planes) - 1, "the mesh was opened for another number of ranks"
        self.connections.append(ThreadConnection(parallel, self.planes, self._servers, self._reader, self.cheat))
        return self.connections[-1]

    def note_links(self, topology: Any, links: Any) -> None: ...

    def note_measures(self, measures: Any) -> None:
        self.measures = measures

    def attach(self, job: Any) -> None: ...

    def detach(self, job: Any) -> None: ...


@contextmanager
def thread_session(ranks: int) -> Iterator[Any]:
    """A session with planes for `ranks` ranks, for `Trainer(session=...)`; one job at a time."""
    with mesh(Authority(), ranks, driver=True) as planes:
        yield cast("Any", ThreadSession(planes))
