"""The rows of a node's own account as values."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.statement import UnitState
from distensor_server.income.standing import Standing


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class RankLine:
    """One rank of one membership: its units are numbered by steps."""

    job_id: JobId
    epoch: Epoch
    rank: Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnUnit:
    """A unit as this node keeps it. `claimed` is None for what only the hub knows; `seen` is Unix time."""

    line: RankLine
    step: int
    claimed: int | None
    seen: int
    standing: Standing
    hub_state: UnitState | None
    hub_claimed: int | None
    hub_received: int | None
    micro: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Units of one standing. `since` is when the oldest was seen, Unix time; None for none."""

    units: int = 0
    micro: int = 0
    micro_batches: int = 0
    since: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """What one device used in one hour. `source` is 'measured' or 'fixed'."""

    hour: int
    device: str
    source: str
    millijoules: int
    measured_ms: int
    work_ms: int
