"""What one rank knows of a step, before and after its decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.node.pipeline import Totals
from distensor.node.world_sums import WorldSums
from distensor.optim.distro.protection import Exchanged
from distensor.sync import Held

if TYPE_CHECKING:
    from distensor.core.warm_up import RankFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """What there was to notice about replicas that keep their own gradients, by their numbers.

    dropped: their loss or gradient was no finite number, and this step is without them.
    exchanged: of the newest exchange of updates.
    """

    dropped: tuple[int, ...] = ()
    exchanged: Exchanged = field(default_factory=Exchanged)

    def to_json(self) -> dict[str, Any]:
        found = self.exchanged
        return {
            "dropped": sorted({*self.dropped, *found.silent}),
            "clipped": list(found.clipped),
            "copies": [list(pair) for pair in found.copies],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one rank can say of a step."""

    loss: float
    weight: float
    grad_norm: float
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    committed: bool
    held: Held
    optimizer_bytes: int
    scale: float
    """What makes of this rank's sums of gradients what its optimizer gets."""
    sums: WorldSums | None = None
    """What it was decided from; another rank that lacks them may need them."""
    figures: RankFigures | None = None
    """Of the pipeline, where they were to be measured."""
    noticed: Noticed | None = None
    """None where gradients are summed."""
    sketch: Mapping[str, tuple[float, float]] | None = None
    """Of what this rank itself computed, where that was wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What a step has decided: the learning rate, by what the sums of the gradients are multiplied, and whether
    replicas that take steps of their own exchange what came of them."""

    lr: float
    scale: float
    exchange: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The gradients of step `number` are complete on this rank, and on every other; the decision is still to come."""

    number: int
    totals: Totals
    in_axes: float
    started: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """Step `number` is committed here."""

    number: int
    report: StepReport | None
    """None where the state came from another rank."""
