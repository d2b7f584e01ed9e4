"""How the weights are cut: as even as what is done with them allows, found by trying."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm

from distensor.core.errors import ShardingError
from distensor.core.layouts import WeightLayout, even_lengths
from distensor.core.problems import Problems
from distensor.program.partitioning.layout import Layout, Origin, common_multiple

_LAYER = re.compile(r"\.\d+(?=[.'])")


class RestartError(Exception):
    """A weight must be cut otherwise: another pass is needed."""


@dataclass(frozen=True, slots=True)
class UnitIn:
    """Owners change only at multiples of `unit` between `start` and `stop` of a weight's cut dim."""

    start: int
    stop: int
    unit: int


@dataclass(slots=True)
class WeightPlan:
    """One weight: blocks between `cuts`, each spread evenly over the ranks in multiples of its unit."""

    name: str
    shape: tuple[int, ...]
    dim: int
    ranks: int
    units: frozenset[UnitIn] = frozenset()
    cuts: frozenset[int] = frozenset()
    trouble: str | None = None
    """Why this cut is a way out, and refused when it does not lead to compute without gathering."""

    @property
    def extent(self) -> int:
        return self.shape[self.dim]

    def blocks(self, units: Iterable[UnitIn] = (), cuts: Iterable[int] = ()) -> list[tuple[int, int]]:
        """(length, unit) of each block, with further units and cuts."""
        at = sorted({0, self.extent, *self.cuts, *cuts})
        known = (*self.units, *units)
        return [(stop - start, _unit_between(known, start, stop)) for start, stop in pairwise(at)]

    def allows(self, units: Iterable[UnitIn] = (), cuts: Iterable[int] = ()) -> bool:
        """Whether every block has a unit for each rank."""
        return all(length % unit == 0 and length // unit >= self.ranks for length, unit in self.blocks(units, cuts))

    def unit_between(self, start: int, stop: int) -> int:
        return _unit_between(self.units, start, stop)

    def layout(self) -> WeightLayout:
        segments = [
            (length, owner)
            for block, unit in self.blocks()
            for owner, length in enumerate(even_lengths(block, self.ranks, unit))
        ]
        return WeightLayout(shape=self.shape, dim=self.dim, ranks=self.ranks, segments=tuple(segments))

    def start(self) -> Layout:
        """The layout of the weight's own dim."""
        return Layout.of(self.layout().segments, origins={self.name: Origin()})


def _unit_between(units: Iterable[UnitIn], start: int, stop: int) -> int:
    return lcm(*(item.unit for item in units if item.start < stop and start < item.stop))


class Plans:
    """The plans of all cut weights.

    Raises:
        ShardingError: a weight with fewer elements along its dim than ranks (SeveralProblemsError: several).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dims: Mapping[str, int], ranks: int) -> None:
        self.ranks = ranks
        self.changed = False
        """Whether a plan changed since the pass began."""
        self.of = {
            name: WeightPlan(name=name, shape=shapes[name], dim=dim % len(shapes[name]), ranks=ranks)
            for name, dim in dims.items()
        }
        self.problems: dict[str, None] = {
            f"{plan.name!r} has {plan.extent} elements along dim {plan.dim} and tensor_parallel={ranks}: "
            f"use Replicate() for it, or at most {plan.extent} ranks": None
            for plan in self.of.values()
            if not plan.allows()
        }
        """What cannot be cut for this many ranks, found in this pass."""
        self.report()

    def begin(self) -> None:
        """A new pass: layouts follow the plans as they are now."""
        self.changed = False
        self.problems.clear()

    def report(self) -> None:
        """Raise what was found, the same of several layers once."""
        groups: dict[str, list[str]] = {}
        for message in self.problems:
            groups.setdefault(_LAYER.sub(".*", message), []).append(message)
        problems = Problems()
        for pattern, messages in groups.items():
            problems.add(ShardingError(pattern if len(messages) > 1 else messages[0]))
        problems.report()

    def can_use_unit(self, layout: Layout, unit: Fraction | int) -> bool:
        """Whether all weights behind `layout` can be cut so that it changes owners at multiples of `unit` only."""
        wanted = self._units(layout, unit)
        return bool(wanted) and all(self.of[name].allows(units) for name, units in wanted.items())

    def use_unit(self, layout: Layout, unit: Fraction | int) -> None:
        """Cut them so. Raises RestartError if that changes a plan, or one has changed in this pass."""
        self._set_units(layout, unit)
        self._restart_if_changed()

    def _set_units(self, layout: Layout, unit: Fraction | int) -> None:
        for name, units in self._units(layout, unit).items():
            plan = self.of[name]
            new = frozenset(item for item in units if plan.unit_between(item.start, item.stop) % item.unit)
            if new and plan.allows(new):
                plan.units |= new
                self.changed = True

    def _restart_if_changed(self) -> None:
        """What was seen since a change is out of date: layouts follow the plans as they were."""
        if self.changed:
            raise RestartError

    def _units(self, layout: Layout, unit: Fraction | int) -> dict[str, frozenset[UnitIn]]:
        """What a unit in a layout asks of each weight behind it."""
        return {
            name: frozenset(
                UnitIn(start, stop, (unit * origin.scale).numerator)
                for start, stop in origin.ranges(layout.total, self.of[name].extent)
            )
            for name, origin in layout.origins.items()
        }

    def granularity(self, layout: Layout) -> Fraction:
        """What the weights' units come to in a layout: owners change only at multiples of it."""
        found = Fraction(1)
        for name, origin in layout.origins.items():
            for start, stop in origin.ranges(layout.total, self.of[name].extent):
                found = common_multiple(found, self.of[name].unit_between(start, stop) / origin.scale)
        return found

    def can_cut(self, layout: Layout, positions: Iterable[int], unit: int = 1) -> bool:
        """Whether all weights behind `layout` can have blocks that end at these positions, with units inside."""
        wanted, units = self._cuts(layout, positions), self._units(layout, unit)
        return bool(wanted) and all(cuts and self.of[name].allows(units[name], cuts) for name, cuts in wanted.items())

    def use_cuts(self, layout: Layout, positions: Iterable[int], trouble: str | None = None) -> None:
        """Cut them so; units that do not fit into the blocks are forgotten. Raises RestartError like `use_unit`."""
        self._set_cuts(layout, positions, trouble)
        self._restart_if_changed()

    def _set_cuts(self, layout: Layout, positions: Iterable[int], trouble: str | None) -> None:
        for name, cuts in self._cuts(layout, positions).items():
            plan = self.of[name]
            bare = replace(plan, units=frozenset())
            if cuts <= plan.cuts or not bare.allows((), cuts):
                continue
            plan.units = plan.units if plan.allows((), cuts) else frozenset()
            plan.cuts |= cuts
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

    def agree(self, first: Layout, second: Layout) -> None:
        """Two layouts of one dim differ: cut their weights alike. Raises RestartError if that changes a plan."""
        common = common_multiple(self.granularity(first), self.granularity(second))
        for layout in (first, second):
            if self.can_use_unit(layout, common):
                self._set_units(layout, common)
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

    def note_detour(self, layout: Layout) -> None:
        """A value that follows a weight cut as a way out is gathered: the weight has too few units after all."""
        for name in layout.origins:
            trouble = self.of[name].trouble
            if trouble is not None:
                self.problems[trouble] = None

    def too_few(self, layout: Layout, unit: Fraction | int, place: str) -> str:
        """The message for a weight with fewer units than ranks."""
        for name, wanted in self._units(layout, unit).items():
            plan = self.of[name]
            if not plan.allows(wanted):
                length, needed = min(plan.blocks(wanted), key=lambda block: block[0] // block[1])
                units = length // needed
                return (
                    f"{name!r} is used in units of {needed} along dim {plan.dim} (in {place or 'the root module'!r}): "
                    f"{units} {'unit' if units == 1 else 'units'} for tensor_parallel={plan.ranks}; "
                    f"use Replicate() for it, or at most tensor_parallel={max(units, 1)}"
                )
        return f"a cut dim cannot be used in units of {unit} in {place!r}"
