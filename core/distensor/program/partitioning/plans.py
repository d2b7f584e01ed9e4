"""How the weights are cut: as even as what is done with them allows, found by trying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import lcm

from distensor.core.errors import ShardingError
from distensor.core.layouts import WeightLayout, even_lengths
from distensor.program.partitioning.layout import Layout, Origin


class RestartError(Exception):
    """A weight must be cut otherwise: another pass is needed."""


@dataclass(slots=True)
class WeightPlan:
    """One weight: blocks between `cuts`, each spread evenly over the ranks in multiples of `unit`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    ranks: int
    unit: int = 1
    unit_place: str = ""
    """The module that needs the unit."""
    cuts: set[int] = field(default_factory=set)
    trouble: str | None = None
    """Why this cut is a way out, and refused when it does not lead to compute without gathering."""

    @property
    def extent(self) -> int:
        return self.shape[self.dim]

    def lengths(self, cuts: Iterable[int] = ()) -> list[int]:
        """The blocks, with further cuts."""
        at = sorted({0, self.extent, *self.cuts, *cuts})
        return [stop - start for start, stop in pairwise(at)]

    def allows(self, unit: int, cuts: Iterable[int] = ()) -> bool:
        """Whether every block has a unit for each rank."""
        return all(length % unit == 0 and length // unit >= self.ranks for length in self.lengths(cuts))

    def layout(self) -> WeightLayout:
        segments = [
            (length, owner)
            for block in self.lengths()
            for owner, length in enumerate(even_lengths(block, self.ranks, self.unit))
        ]
        return WeightLayout(shape=self.shape, dim=self.dim, ranks=self.ranks, segments=tuple(segments))

    def start(self) -> Layout:
        """The layout of the weight's own dim."""
        return Layout.of(self.layout().segments, origins={self.name: Origin()})


class Plans:
    """The plans of all cut weights.

    Raises:
        ShardingError: a weight with fewer elements along its dim than ranks.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int], ranks: int) -> None:
        self.ranks = ranks
        self.changed = False
        """Whether a plan changed since the pass began."""
        self.of = {
            name: WeightPlan(name=name, shape=shapes[name], dim=dim % len(shapes[name]), ranks=ranks)
            for name, dim in dims.items()
        }
        for plan in self.of.values():
            if not plan.allows(1):
                raise ShardingError(
                    f"{plan.name!r} has {plan.extent} elements along dim {plan.dim} and tensor_parallel={ranks}: "
                    f"use Replicate() for it, or at most {plan.extent} ranks"
                )

    @property
    def units(self) -> dict[str, int]:
        return {name: plan.unit for name, plan in self.of.items()}

    def can_use_unit(self, layout: Layout, unit: Fraction | int) -> bool:
        """Whether all weights behind `layout` can be cut so that it changes owners at multiples of `unit` only."""
        wanted = self._units(layout, unit)
        return bool(wanted) and all(self.of[name].allows(value) for name, value in wanted.items())

    def use_unit(self, layout: Layout, unit: Fraction | int, place: str) -> None:
        """Cut them so. Raises RestartError if that changes a plan, or one has changed in this pass."""
        self._set_units(layout, unit, place)
        self._restart_if_changed()

    def _set_units(self, layout: Layout, unit: Fraction | int, place: str) -> None:
        for name, value in self._units(layout, unit).items():
            plan = self.of[name]
            if plan.allows(value) and plan.unit != value:
                plan.unit, plan.unit_place = value, place
                self.changed = True

    def _restart_if_changed(self) -> None:
        """What was seen since a change is out of date: layouts follow the plans as they were."""
        if self.changed:
            raise RestartError

    def _units(self, layout: Layout, unit: Fraction | int) -> dict[str, int]:
        return {
            name: lcm(self.of[name].unit, (unit * origin.scale).numerator) for name, origin in layout.origins.items()
        }

    def can_cut(self, layout: Layout, positions: Iterable[int], unit: int = 1) -> bool:
        """Whether all weights behind `layout` can have blocks that end at these positions, with units inside."""
        wanted = self._cuts(layout, positions)
        units = {name: (unit * origin.scale).numerator for name, origin in layout.origins.items()}
        return bool(wanted) and all(cuts and self.of[name].allows(units[name], cuts) for name, cuts in wanted.items())

    def use_cuts(self, layout: Layout, positions: Iterable[int], trouble: str | None = None) -> None:
        """Cut them so; units that do not fit into the blocks are forgotten. Raises RestartError like `use_unit`."""
        self._set_cuts(layout, positions, trouble)
        self._restart_if_changed()

    def _set_cuts(self, layout: Layout, positions: Iterable[int], trouble: str | None) -> None:
        for name, cuts in self._cuts(layout, positions).items():
            plan = self.of[name]
            new = cuts - plan.cuts
            if new and plan.allows(1, new):
                plan.unit = plan.unit if plan.allows(plan.unit, new) else 1
                plan.cuts |= new
                plan.trouble = plan.trouble or trouble
                self.changed = True

    def _cuts(self, layout: Layout, positions: Iterable[int]) -> dict[str, set[int]]:
        wanted = list(positions)
        return {
            name: {
                place for position in wanted for place in origin.positions(position) if 0 < place < self.of[name].extent
            }
            for name, origin in layout.origins.items()
        }

    def agree(self, first: Layout, second: Layout, place: str) -> None:
        """Two layouts of one dim differ: cut their weights alike. Raises RestartError if that changes a plan."""
        units = self.units
        common = first.granularity(units)
        common *= (common / second.granularity(units)).denominator
        for layout in (first, second):
            if self.can_use_unit(layout, common):
                self._set_units(layout, common, place)
        self._restart_if_changed()
        borders = self._borders(first), self._borders(second)
        self._set_cuts(first, borders[1], None)
        self._set_cuts(second, borders[0], None)
        self._restart_if_changed()

    def _borders(self, layout: Layout) -> set[int]:
        """The positions in a layout where blocks of its weights end."""
        return {
            position
            for name, origin in layout.origins.items()
            for place in self.of[name].cuts
            for position in origin.found(place)
        }

    def refuse_detour(self, layout: Layout) -> None:
        """A value that follows a weight cut as a way out is about to be gathered: say what would be right."""
        for name in layout.origins:
            trouble = self.of[name].trouble
            if trouble is not None and not self.changed:
                raise ShardingError(trouble)

    def too_few(self, layout: Layout, unit: Fraction | int, place: str) -> str:
        """The message for a weight with fewer units than ranks."""
        for name, value in self._units(layout, unit).items():
            plan = self.of[name]
            if not plan.allows(value):
                units = plan.extent // value
                return (
                    f"{name!r} is used in units of {value} along dim {plan.dim} (in {place or 'the root module'!r}): "
                    f"{units} {'unit' if units == 1 else 'units'} for tensor_parallel={plan.ranks}; "
                    f"use Replicate() for it, or at most tensor_parallel={max(units, 1)}"
                )
        return f"a cut dim cannot be used in units of {unit} in {place!r}"
