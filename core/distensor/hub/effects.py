"""What the hub's state machine wants done. The records are committed before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, TypeAlias

from distensor.comm.messages import HubToNode, Rejected
from distensor.core.control import JobUpdate, NodeInfo
from distensor.core.ids import Epoch, JobId, NodeId
from distensor.hub.records import JobRecord, NodeRecord, RankRecord

SessionId = NewType("SessionId", int)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveInfo:
    """What a node says of itself. Its credential is another's to write: one that is queued must not undo a new one."""

    node_id: NodeId
    info: NodeInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveJob:
    """A new job with all its ranks, or a new state of a known one; `new_epoch`: with other ranks."""

    job: JobRecord
    new: bool = False
    new_epoch: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRank:
    job_id: JobId
    epoch: Epoch
    rank: RankRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class SpendToken:
    """The session's node holds its credential: the token that it joined with is used up."""

    node: NodeRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    session: SessionId
    message: HubToNode


@dataclass(frozen=True, kw_only=True, slots=True)
class Disconnect:
    session: SessionId
    why: Rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    update: JobUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line for the hub's log."""

    text: str


Save: TypeAlias = SaveInfo | SaveJob | SaveRank | SpendToken
Effect: TypeAlias = Save | Send | Disconnect | Publish | Note
