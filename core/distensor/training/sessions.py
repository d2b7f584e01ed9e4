"""`ds.init`, `ds.query_mesh`, `ds.session`, `ds.shutdown`: where the work of this process goes."""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from distensor.comm import HubClient
from distensor.core import SYSTEM_CLOCK, Clock, JobId, ParallelConfig
from distensor.core.control import Mesh, MeshMeasures, Topology
from distensor.core.errors import ConfigError, SessionError, UnsupportedOptionError
from distensor.training.connection import JobConnection
from distensor.training.local import LocalCluster
from distensor.transport import Timeouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distensor.training.replies import LinkBytes
    from distensor.training.taking_over import TakenOver

START_SECONDS = 120.0
"""How long a job may take from its submission until all its workers are ready."""

TOKEN_VARIABLE = "DISTENSOR_TOKEN"  # noqa: S105 - the name of a variable, not a secret


class Job(Protocol):
    """What a session has to know of a trainer that uses it."""

    @property
    def failure(self) -> str: ...

    def close(self) -> None: ...


class Session:
    """A connection to a hub, and for `mode="local"` the hub and the nodes themselves."""

    def __init__(self, *, client: HubClient, cluster: LocalCluster | None, clock: Clock) -> None:
        self.client = client
        self.cluster = cluster
        self.clock = clock
        self._jobs: list[Job] = []
        self._closed = False
        self._measures: MeshMeasures | None = None
        self._told_links: tuple[Topology, Mapping[int, Sequence[LinkBytes]]] | None = None

    @property
    def leaves_workers(self) -> bool:
        """Whether workers outlive this process, so that another one may go on with them."""
        return self.cluster is None

    def query_mesh(self) -> Mesh:
        """What the hub knows, and what a job of this session has measured."""
        return dataclasses.replace(self.client.query_mesh(), measures=self._all_measures())

    def _all_measures(self) -> MeshMeasures | None:
        if self._told_links is None:
            return self._measures
        from distensor.training.measures import measured_ways

        ways = measured_ways(*self._told_links)
        measures = self._measures or MeshMeasures(links={}, speed={})
        return dataclasses.replace(measures, ways=ways)

    def note_links(self, topology: Topology, links: Mapping[int, Sequence[LinkBytes]]) -> None:
        """What the ranks of the newest job told of their connections in its newest step."""
        self._told_links = topology, links

    def note_measures(self, measures: MeshMeasures) -> None:
        """The newest job's; they are kept when it has ended."""
        self._measures = measures

    def open_job(
        self,
        *,
        name: str,
        parallel: ParallelConfig,
        bytes_per_rank: tuple[int, ...],
        largest_tensor: int,
        aggregators: tuple[str, ...] = (),
        micro_batches: int = 0,
        wait: bool = False,
        priority: int = 0,
    ) -> JobConnection:
        """Have a job placed and connect to its workers; see `JobConnection.open`."""
        return JobConnection.open(
            client=self.client,
            name=name,
            parallel=parallel,
            bytes_per_rank=bytes_per_rank,
            largest_tensor=largest_tensor,
            clock=self.clock,
            timeouts=Timeouts(),
            start_timeout=START_SECONDS,
            aggregators=aggregators,
            micro_batches=micro_batches,
            wait=wait,
            priority=priority,
        )

    def take_over(self, job_id: JobId, largest_tensor: int) -> TakenOver:
        """Go on with the workers of a job whose trainer has ended; see `taking_over.take_over`."""
        from distensor.training.taking_over import take_over

        return take_over(client=self.client, job_id=job_id, clock=self.clock, largest_tensor=largest_tensor)

    def attach(self, job: Job) -> None:
        """`job` is closed before the session is. Jobs that have failed are closed now: their workers are needed."""
        for failed in [known for known in self._jobs if known.failure]:
            failed.close()
            self.detach(failed)
        if job not in self._jobs:
            self._jobs.append(job)

    def detach(self, job: Job) -> None:
        """Forget a job that has ended."""
        self._jobs = [known for known in self._jobs if known is not job]

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:  # last in, first out; what fails to close keeps none of the others open
            if self.cluster is not None:
                closing.callback(self.cluster.close)
            closing.callback(self.client.close)
            for job in self._jobs:
                closing.callback(job.close)
            self._jobs = []


_lock = threading.Lock()
_current: Session | None = None


def init(
    mode: str = "local",
    *,
    workers: int | None = None,
    nodes: int = 1,
    node_names: Sequence[str] | None = None,
    token: str | None = None,
    api_key: str | None = None,
    address: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Session:
    """Say where the work of this process goes. Takes what `open_session` takes; ends with `shutdown` or the process.

    Raises:
        SessionError: a session is open already.
        and what `open_session` raises.
    """
    global _current
    with _lock:
        if _current is not None and not _current.closed:
            raise SessionError("distensor.init: a session is open already; call distensor.shutdown() first")
        _current = open_session(
            mode,
            workers=workers,
            nodes=nodes,
            node_names=node_names,
            token=token,
            api_key=api_key,
            address=address,
            clock=clock,
        )
        return _current


def open_session(
    mode: str = "local",
    *,
    workers: int | None = None,
    nodes: int = 1,
    node_names: Sequence[str] | None = None,
    token: str | None = None,
    api_key: str | None = None,
    address: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Session:
    """A session of its own, which the caller closes.

    Args:
        mode: "local" starts a hub and `nodes` supervisors with `workers` CPU workers in all on this machine;
            "hub" uses the hub that `token` (or the variable DISTENSOR_TOKEN) names.
        workers: at most so many ranks can be placed; by default the number of CPUs, at least 4.
        nodes: supervisors of the local mode; `node_names` are their names.
        token: the trainer token that the hub printed.
        api_key: of the cloud mode, which this version does not implement.
        address: "host:port" of the hub; must be the one in the token when both are given.

    Raises:
        ConfigError: a wrong or missing keyword.
        UnsupportedOptionError: mode="cloud".
        SessionError: a local process did not start.
        HubUnreachableError, AuthenticationError: the hub did not take us.
    """
    match mode:
        case "local":
            if token is not None or address is not None:
                raise ConfigError('init(mode="local") starts its own hub; token and address belong to mode="hub"')
            return _open_local(workers, nodes, node_names, clock)
        case "hub":
            return _open_hub(token, address, clock)
        case "cloud":
            raise UnsupportedOptionError(
                f'init(mode="cloud"{", api_key=..." if api_key else ""}) is not implemented in this version; '
                'use mode="hub" with a token, or mode="local"'
            )
        case _:
            raise ConfigError(f'init(mode={mode!r}): expected "local" or "hub"')


def _open_local(workers: int | None, nodes: int, names: Sequence[str] | None, clock: Clock) -> Session:
    count = max(4, os.cpu_count() or 1) if workers is None else workers
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"init(workers={workers!r}): expected an integer of at least 1")
    if names is not None and len(names) != nodes:
        raise ConfigError(f"init(nodes={nodes}, node_names={list(names)!r}): expected one name for each node")
    cluster = LocalCluster(workers=count, nodes=nodes, clock=clock, names=names)
    try:
        client = HubClient(cluster.trainer_token, clock=clock)
    except BaseException:  # whatever it was, the processes must not stay
        cluster.close()
        raise
    return Session(client=client, cluster=cluster, clock=clock)


def _open_hub(token: str | None, address: str | None, clock: Clock) -> Session:
    from distensor.comm.tokens import decode_token

    text = token or os.environ.get(TOKEN_VARIABLE)
    if not text:
        raise ConfigError(
            f'init(mode="hub") needs token=... or the variable {TOKEN_VARIABLE}: the trainer token that the hub printed'
        )
    named = str(decode_token(text).address)
    if address is not None and address != named:
        raise ConfigError(f"init(address={address!r}): the token is for the hub at {named!r}")
    client = HubClient(text, clock=clock)
    try:
        client.query_mesh()
    except BaseException:  # nobody else will close it
        client.close()
        raise
    return Session(client=client, cluster=None, clock=clock)


def current_session() -> Session:
    """The open session, or SessionError saying how to open one."""
    with _lock:
        if _current is None or _current.closed:
            raise SessionError('no session: call distensor.init(mode="local") first')
        return _current


def query_mesh() -> Mesh:
    """The nodes, devices and free workers that the hub knows of right now."""
    return current_session().query_mesh()


def shutdown() -> None:
    """End what `init` started: jobs, then nodes, then the hub. Safe to call without a session."""
    global _current
    with _lock:
        ending, _current = _current, None
    if ending is not None:
        ending.close()


@contextmanager
def session(mode: str = "local", **options: Any) -> Iterator[Session]:
    """`init` at the start of a block, `shutdown` at its end, whatever happens between."""
    opened = init(mode, **options)
    try:
        yield opened
    finally:
        shutdown()


atexit.register(shutdown)
