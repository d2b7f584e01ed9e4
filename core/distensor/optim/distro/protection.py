"""What workers do about each other's updates: scale down, notice copies, average without trusting a few. Pure.

Every worker sees the same messages and so decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from distensor.optim.distro.codec import Integers, Magnitudes, Rows
from distensor.optim.distro.layout import Layout
from distensor.optim.sparse_spec import Average

Scales: TypeAlias = "Sequence[Sequence[Magnitudes]]"
"""By update and block: a number for each row."""

COPIED = 0.4
"""Overlap of the places of two workers above which one is taken for a copy: honest ones share 0.7 to 2 % of them."""

SAMPLED_ROWS = 64
"""Rows that are compared: 2,048 places of k=32, enough to tell 40 % from 2 %."""

IN_A_ROW = 8
"""Exchanges in which a pair has to be alike before it is told of. Honest workers are alike when a run begins: all
entries of Adam's first update are one, and momenta of a few steps see the same large directions (measured: 0.73 in the
first exchange of DisTrO-AdamW, 0.76, 0.65 and 0.51 in the first three of DeMo, at most 0.24 from the sixth on)."""

MIN_PLACES = 32
"""With fewer places that were chosen freely, a large overlap says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """One exchange, by the ranks of the group.

    silent: workers whose update did not come or was no finite number, and is in nobody's weights.
    clipped: workers of whose update more than half was taken away, since it was much larger than those of most.
    copies: pairs whose updates have chosen the same places for some exchanges in a row.
    """

    silent: tuple[int, ...] = ()
    clipped: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


def row_factors(updates: Sequence[Sequence[Rows]], largest: float | None) -> Scales:
    """By what each row of each update is multiplied, so that none has more than `largest` times the median norm of all
    workers' same row.

    Row by row, since a rank sends only its own part of a model, and copies of one weight on several ranks have to stay
    equal. The fewer entries a row sends, the more its norm varies among honest workers: `largest` grows by the root of
    1 + 8 / entries. Rows of zeros do not count; fewer than three others say nothing about each other.
    """
    found: list[list[Magnitudes]] = [[] for _ in updates]
    for blocks in zip(*updates, strict=True):
        norms = np.stack([np.linalg.norm(rows.values(), axis=1) for rows in blocks])
        limit = None if largest is None else largest * math.sqrt(1.0 + 8.0 / blocks[0].places.shape[1])
        for mine, scale in zip(found, _row_scales(norms, limit), strict=True):
            mine.append(scale)
    return found


def _row_scales(norms: Magnitudes, largest: float | None) -> Magnitudes:
    """Of (workers, rows)."""
    scales = np.ones_like(norms)
    judged = (norms > 0).sum(axis=0) >= 3
    if largest is None or not judged.any():
        return scales
    seen = norms[:, judged]
    limits = largest * np.nanmedian(np.where(seen > 0, seen, np.nan), axis=0)
    scales[:, judged] = np.where(seen > limits, limits / np.maximum(seen, limits), 1.0)
    return scales


def lost_most(update: Sequence[Rows], scales: Sequence[Magnitudes]) -> bool:
    """Whether scaling takes more than half of the norm of what one worker sent."""
    squares = [np.square(rows.values(), dtype=np.float64).sum(axis=1) for rows in update]
    before = math.fsum(float(square.sum()) for square in squares)
    after = math.fsum(float((square * np.square(scale)).sum()) for square, scale in zip(squares, scales, strict=True))
    return after < 0.25 * before


def copied(layout: Layout, updates: Sequence[Sequence[Rows]]) -> list[tuple[int, int]]:
    """Pairs, by index, that chose the same places: more than `COPIED` beyond what chance makes equal.

    Rows that send most of their entries overlap by chance, so what counts is (overlap - chance) / (1 - chance), with
    chance = kept / length. Only some rows of the longest are looked at.
    """
    if len(updates) < 2 or not layout.blocks or layout.blocks[0].entries < MIN_PLACES:
        return []
    block = layout.blocks[0]
    if block.kept == block.length:
        return []
    rows = np.linspace(0, block.rows - 1, min(block.rows, SAMPLED_ROWS)).astype(np.int64)
    starts = np.arange(len(rows))[:, None] * block.length
    # Rows of zeros send nothing: no place of theirs was chosen.
    chosen = [(update[0].places[rows] + starts)[update[0].codes[rows] > 0].ravel() for update in updates]
    return [
        (one, other)
        for one, other in combinations(range(len(updates)), 2)
        if _alike(chosen[one], chosen[other], block.kept / block.length) > COPIED
    ]


class CopyWatch:
    """Which pairs have been alike for long enough to be told of."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], int] = {}

    def see(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The pairs of this exchange, those of `IN_A_ROW` exchanges in a row back."""
        self._times = {pair: self._times.get(pair, 0) + 1 for pair in pairs}
        return tuple(pair for pair, times in self._times.items() if times >= IN_A_ROW)


def _alike(one: Integers, other: Integers, chance: float) -> float:
    fewest = min(len(one), len(other))
    if fewest < MIN_PLACES:
        return 0.0
    return (len(np.intersect1d(one, other, assume_unique=True)) / fewest - chance) / (1.0 - chance)


def trimmed_mean(stack: Tensor, trim: int) -> Tensor:
    """Of (workers, elements): the mean of each element without its `trim` smallest and largest values.

    Yin, Chen, Kannan, Bartlett: Byzantine-Robust Distributed Learning, 2018.
    """
    return stack.sort(dim=0).values[trim : len(stack) - trim].mean(dim=0)


def centred_mean(stack: Tensor, rounds: int = 3) -> Tensor:
    """Of (workers, elements): the mean of differences to a centre, each clipped to their median length.

    The centre begins at the element-wise median and moves by that mean `rounds` times. Karimireddy, He, Jaggi:
    Learning from History for Byzantine Robust Optimization, 2021; the radius is ours, since none is known beforehand.
    """
    centre = stack.median(dim=0).values
    for _ in range(rounds):
        away = stack - centre
        lengths = away.norm(dim=1)
        radius = lengths.median()
        scale = torch.where(lengths > radius, radius / lengths.clamp(min=1e-30), torch.ones_like(lengths))
        centre = centre + (away * scale[:, None]).mean(dim=0)
    return centre


def robust_mean(stack: Tensor, average: Average) -> Tensor:
    """The rows of `stack` as one; trimmed means leave out a quarter at each end, at least one where there are three."""
    match average:
        case Average.TRIMMED:
            return trimmed_mean(stack, max(len(stack) // 4, 1) if len(stack) > 2 else 0)
        case Average.CENTRED:
            return centred_mean(stack)
        case Average.MEAN:
            return stack.mean(dim=0)
