"""How a tensor dim is spread over the ranks of an axis, and what views and slices make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from distensor.program.expressions import Extent
from distensor.program.partitioning.extents import divided, normal, plus, times

Segments: TypeAlias = "tuple[tuple[Extent, int], ...]"
"""(length, owner) in order."""
_MOST_UNROLLED = 512


@dataclass(frozen=True, slots=True)
class Origin:
    """Where positions of a layout lie in the cut dim of a weight: offset + position * scale, repeated by `periods`.

    `offset` None: the positions are not known, only that one position is `scale` elements of the weight.
    """

    scale: Fraction = Fraction(1)
    offset: Fraction | None = Fraction(0)
    periods: tuple[tuple[int, Fraction], ...] = ()

    def positions(self, position: int) -> Iterator[int]:
        """The places in the weight of a position, where they are known and whole."""
        places = (start + position * self.scale for start in self._starts())
        yield from (int(place) for place in places if place.denominator == 1)

    def found(self, place: int) -> Iterator[int]:
        """The positions of a place in the weight, where they are known and whole."""
        positions = ((place - start) / self.scale for start in self._starts())
        yield from (int(position) for position in positions if position.denominator == 1)

    def ranges(self, total: Extent, extent: int) -> list[tuple[int, int]]:
        """(start, stop) of a layout of this total in the weight's dim; all of its `extent` where that is not known."""
        length = total * self.scale if isinstance(total, int) else None
        found = [] if length is None else [(start, start + length) for start in self._starts()]
        is_known = found and all(part.denominator == 1 for pair in found for part in pair)
        return [(int(start), int(stop)) for start, stop in found] if is_known else [(0, extent)]

    def _starts(self) -> list[Fraction]:
        """Where position 0 lies in the weight."""
        places = [] if self.offset is None else [self.offset]
        for count, stride in self.periods:
            places = [place + index * stride for place in places for index in range(count)]
        return places


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A dim as outer x segments x inner; each segment belongs to one rank.

    Normal form (made by `of`): neighbours have different owners, no segment is empty, and factors that are numbers
    are part of the segments. `origins` are the weights whose cut this layout follows.
    """

    segments: Segments
    outer: Extent = 1
    inner: Extent = 1
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, segments: Segments, outer: Extent = 1, inner: Extent = 1, origins: Mapping[str, Origin] | None = None
    ) -> Layout:
        known = dict(origins or {})
        if isinstance(inner, int) and inner != 1:
            segments = tuple((times((length, inner)), owner) for length, owner in segments)
            known = {name: replace(origin, scale=origin.scale / inner) for name, origin in known.items()}
            inner = 1
        if isinstance(outer, int) and 1 < outer <= _MOST_UNROLLED:
            block = plus(length for length, _ in segments)
            known = {name: _unrolled(origin, outer, block) for name, origin in known.items()}
            segments, outer = segments * outer, 1
        return cls(segments=_merged(segments), outer=normal(outer), inner=normal(inner), origins=known)

    @property
    def total(self) -> Extent:
        """The length of all segments."""
        return plus(length for length, _ in self.segments)

    @property
    def extent(self) -> Extent:
        return times((self.outer, self.total, self.inner))

    def held(self, rank: int) -> Extent:
        """The extent of the dim on one rank."""
        return times((self.outer, plus(length for length, owner in self.segments if owner == rank), self.inner))

    def joined(self, other: Layout) -> Layout:
        """The same layout, following the weights of both."""
        return replace(self, origins={**other.origins, **self.origins})


def _unrolled(origin: Origin, count: int, block: Extent) -> Origin:
    """`count` blocks one after the other: known places if they lie so in the weight."""
    if isinstance(block, int) and (count, block * origin.scale) in origin.periods:
        rest = list(origin.periods)
        rest.remove((count, block * origin.scale))
        return replace(origin, periods=tuple(rest))
    return replace(origin, offset=None)


def common_multiple(left: Fraction, right: Fraction) -> Fraction:
    """The smallest number that both divide."""
    ratio = left / right
    return left * ratio.denominator


def _merged(segments: Segments) -> Segments:
    found: list[tuple[Extent, int]] = []
    for length, owner in segments:
        if length == 0:
            continue
        if found and found[-1][1] == owner:
            found[-1] = (plus((found[-1][0], length)), owner)
        else:
            found.append((normal(length), owner))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A value of which each rank holds a part of one dim (counted from the first)."""

    dim: int
    layout: Layout


def cropped(layout: Layout, start: int, stop: int) -> Layout:
    """The part from `start` to `stop` of a layout whose segments are numbers, without outer and inner."""
    kept: list[tuple[Extent, int]] = []
    at = 0
    for length, owner in layout.segments:
        assert isinstance(length, int)
        low, high = max(at, start), min(at + length, stop)
        if high > low:
            kept.append((high - low, owner))
        at += length
    origins = {
        name: replace(origin, offset=None if origin.offset is None else origin.offset + start * origin.scale)
        for name, origin in layout.origins.items()
    }
    return replace(layout, segments=_merged(tuple(kept)), origins=origins)


def sliceable(layout: Layout) -> int | None:
    """The number of positions of a layout that can be cut at any of them, else None."""
    total = layout.total
    is_plain = layout.outer == 1 and layout.inner == 1 and isinstance(total, int)
    return total if is_plain and isinstance(total, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A way to see a cut dim under another shape. `repeats` > 1 needs that many equal blocks, `unit` > 1 that
    owners change at its multiples only.
    """

    dim: int
    outer: Extent
    inner: Extent
    repeats: int
    unit: int


def views(shape: Sequence[Extent], shard: Shard, made: Sequence[Extent]) -> list[Need]:
    """Every dim of the shape `made` that could hold the cut dim of `shape`, first dims first."""
    layout = shard.layout
    before = times((*shape[: shard.dim], layout.outer))
    after = times((layout.inner, *shape[shard.dim + 1 :]))
    found = []
    for dim in range(len(made)):
        front = _ratio(before, times(made[:dim]))
        back = _ratio(after, times(made[dim + 1 :]))
        if front is not None and back is not None and not _is_one_piece(layout.total, front[1] * back[1]):
            found.append(Need(dim=dim, outer=front[0], inner=back[0], repeats=front[1], unit=back[1]))
    return found


def _is_one_piece(total: Extent, pieces: int) -> bool:
    """Whether nothing would be left to cut."""
    return total == pieces != 1


def _ratio(have: Extent, want: Extent) -> tuple[Extent, int] | None:
    """(what is left over, what is missing)."""
    left = divided(have, want)
    if left is not None:
        return left, 1
    missing = divided(want, have)
    return (1, missing) if isinstance(missing, int) else None


def seen(layout: Layout, need: Need) -> Layout | None:
    """The layout under another shape, or None while it does not have the blocks and units that this needs."""
    segments, total, origins = layout.segments, layout.total, dict(layout.origins)
    if need.repeats > 1:
        if not isinstance(total, int) or total % need.repeats:
            return None
        block = total // need.repeats
        parts = [cropped(layout, at, at + block) for at in range(0, total, block)]
        if any(one.segments != other.segments for one, other in pairwise(parts)):
            return None
        segments = parts[0].segments
        origins = {name: _repeated(origin, need.repeats, block) for name, origin in origins.items()}
    if need.unit > 1:
        shorter = [(divided(length, need.unit), owner) for length, owner in segments]
        if any(length is None for length, _ in shorter):
            return None
        segments = tuple((length, owner) for length, owner in shorter if length is not None)
        origins = {name: replace(origin, scale=origin.scale * need.unit) for name, origin in origins.items()}
    return Layout.of(segments, need.outer, need.inner, origins)


def _repeated(origin: Origin, count: int, block: int) -> Origin:
    return replace(origin, periods=(*origin.periods, (count, block * origin.scale)))
