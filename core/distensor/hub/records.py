"""What the hub remembers of nodes, tokens and jobs. Values; a change is a new one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distensor.core.control import JobSpec, JobState, NodeInfo, WorkerChange, WorkerState
from distensor.core.ids import AccountId, DeviceId, Epoch, JobId, KeyId, NodeId, Rank, WorkerId
from distensor.core.job_report import PassedNode
from distensor.core.parallel import ParallelConfig
from distensor.hub.accounts import MAIN
from distensor.hub.ledger.accounts import MICRO_PER_MICRO_BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """A join token, known by the hash of its secret."""

    secret_hash: str = field(repr=False)
    role: str
    subject: str
    """The name of the trainer's account; for a node's token, a name for logs."""
    used_by: NodeId | None = None
    spent: bool = False
    """True once the node that used it has come back with its credential or beaten once."""
    account: AccountId = MAIN
    """Of what it makes: a node of this account, or this account's trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node, for ever: it keeps its row and its id over restarts of either side."""

    node_id: NodeId
    secret_hash: str = field(repr=False)
    info: NodeInfo
    account: AccountId = MAIN
    joined_by: KeyId | None = None
    """The family of the provider key by which it joined; None for a join token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank of one epoch of a job, and its worker's latest news."""

    rank: Rank
    node_id: NodeId
    device_id: DeviceId
    worker_id: WorkerId
    port: int | None = None
    certificate_pem: str = ""
    state: WorkerState | None = None
    restarts: int = 0
    reason: str = ""
    continues: Rank | None = None
    """The rank of the epoch before whose process goes on as this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Why the ranks of the present epoch are where they are, in order of rank, and why other nodes have none."""

    whys: tuple[str, ...] = ()
    passed: tuple[PassedNode, ...] = ()


NOT_EXPLAINED = Placement()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A job with the ranks of its present epoch, in order of rank."""

    job_id: JobId
    owner: str
    submission: str
    name: str
    parallel: ParallelConfig
    epoch: Epoch
    state: JobState
    driver_certificate_pem: str
    ranks: tuple[RankRecord, ...]
    reason: str = ""
    request: str = ""
    """The trainer's request that made the present epoch; empty for the first one."""
    wish: JobSpec | None = None
    """What the job asks of its places, in later epochs too. Once it has some, without the certificate request and the
    sizes, which are those of one epoch. None for a job that an older hub placed."""
    placement: Placement = NOT_EXPLAINED
    price: int = MICRO_PER_MICRO_BATCH
    """Micro-credits of one micro-batch on one rank, the fee within them: the operator's terms when it was submitted."""
    fee_per_mille: int = 0

    def with_rank(self, rank: RankRecord) -> JobRecord:
        ranks = tuple(rank if old.rank == rank.rank else old for old in self.ranks)
        return replace(self, ranks=ranks)

    def changes(self) -> tuple[WorkerChange, ...]:
        return tuple(
            WorkerChange(
                job_id=self.job_id,
                epoch=self.epoch,
                rank=rank.rank,
                state=rank.state,
                restarts=rank.restarts,
                reason=rank.reason,
            )
            for rank in self.ranks
            if rank.state is not None
        )

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """The nodes of the job, each once, in order of their first rank."""
        return tuple(dict.fromkeys(rank.node_id for rank in self.ranks))
