"""Attention tile by tile, with the log-sum-exp of each row, so that parts of the keys can be merged.

Softmax over a row is computed in parts: each part gives its own average of the values and the log of its sum, and two
parts merge exactly (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; the gradients are those
of FlashAttention, Dao et al. 2022, algorithm 4). Everything here is in 32 bits at least.

Shapes: query [B, G, R, T, D], key [B, G, 1, S, D], value [B, G, 1, S, E]: G key heads, each for R query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from distensor.core.sequence import Tile
from distensor.program.attention_fused import fused_attend, fused_gradients, is_fused_for

TILE = 1024
"""Rows and columns of a tile: bounds the memory for scores to a few megabytes a head."""
_HALVES = (torch.bfloat16, torch.float16)


def wide(value: Tensor) -> Tensor:
    """The same numbers in 32 bits at least."""
    return value.float() if value.dtype in _HALVES else value


def folded(value: Tensor, groups: int) -> Tensor:
    """[B, H, T, D] -> [B, G, R, T, D], in 32 bits at least."""
    return wide(value).reshape(value.shape[0], groups, value.shape[1] // groups, *value.shape[2:])


class Seen(StrEnum):
    """Which keys of a tile its queries see."""

    NOTHING = "nothing"
    EVERYTHING = "everything"
    DIAGONAL = "diagonal"
    """Row i the columns up to i."""
    SOME = "some"
    """As the mask says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """An attention mask [b, h, t, s] (each may be 1): bool (true means seen) or added to the scores."""

    values: Tensor
    groups: int
    _known: dict[Tile, Seen] = field(default_factory=dict)

    @staticmethod
    def of(values: Tensor | None, groups: int) -> Mask | None:
        """Masks of fewer dims are broadcast from the left, as attention does."""
        if values is None:
            return None
        while values.ndim < 4:
            values = values.unsqueeze(0)
        return Mask(values=values, groups=groups)

    def part(self, tile: Tile) -> Tensor:
        """[b, g, r, rows, columns] for a tile: rows by place in the shard, columns by position."""
        values = _narrowed(_narrowed(self.values, 2, tile.row, tile.rows), 3, tile.key, tile.columns)
        groups = 1 if values.shape[1] == 1 else self.groups
        return values.view(values.shape[0], groups, values.shape[1] // groups, *values.shape[2:])

    def seen(self, tile: Tile) -> Seen:
        """Looks into bool masks: models that write causality as a mask get the same work done as others."""
        if tile not in self._known:
            self._known[tile] = self._look(tile)
        return self._known[tile]

    def _look(self, tile: Tile) -> Seen:
        if self.values.dtype is not torch.bool or tile.is_cut:
            return Seen.SOME
        part = self.part(tile)
        if bool(part.all()):
            return Seen.EVERYTHING
        if not bool(part.any()):
            return Seen.NOTHING
        diagonal = tile.query == tile.key and bool((part == _diagonal(tile, part)).all())
        return Seen.DIAGONAL if diagonal else Seen.SOME


def seen(tile: Tile, mask: Mask | None) -> Seen:
    if mask is not None:
        return mask.seen(tile)
    return Seen.DIAGONAL if tile.is_cut else Seen.EVERYTHING


def _diagonal(tile: Tile, like: Tensor) -> Tensor:
    return torch.ones(tile.rows, tile.columns, dtype=torch.bool, device=like.device).tril()


def _narrowed(value: Tensor, dim: int, start: int, length: int) -> Tensor:
    return value if value.shape[dim] == 1 else value.narrow(dim, start, length)


def scores_of(query: Tensor, key: Tensor, scale: float, tile: Tile, mask: Mask | None) -> Tensor:
    """[B, G, R, rows, columns]; minus infinity where a query does not see a key."""
    scores = (query * scale) @ key.transpose(-2, -1)
    found = seen(tile, mask)
    if mask is not None and found is Seen.SOME:
        part = mask.part(tile)
        scores = scores.masked_fill(~part, -math.inf) if part.dtype is torch.bool else scores + part
    if tile.is_cut or found is Seen.DIAGONAL:
        scores = scores.masked_fill(~_diagonal(tile, scores), -math.inf)
    return scores


def _finite(logs: Tensor) -> Tensor:
    """Rows that see nothing have the log of zero; exp(-inf - 0) is the zero that they need."""
    return logs.masked_fill(logs == -math.inf, 0.0)


def attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(average of the values [.., rows, E], log of the sum [.., rows, 1]) of one tile."""
    logs = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - _finite(logs)) @ value, logs


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What both tiles of keys give together."""
    logs = torch.logaddexp(first[1], second[1])
    safe = _finite(logs)
    return first[0] * torch.exp(first[1] - safe) + second[0] * torch.exp(second[1] - safe), logs


def _is_fused(tile: Tile, mask: Mask | None, query: Tensor, value: Tensor) -> bool:
    return seen(tile, mask) is not Seen.SOME and is_fused_for(query, value)


class Running:
    """Outputs of the queries of a shard, merged tile by tile."""

    def __init__(self, query: Tensor, width: int, mask: Mask | None) -> None:
        self._query, self.mask = query, mask
        self.out = query.new_zeros((*query.shape[:-1], width))
        self.logs = query.new_full((*query.shape[:-1], 1), -math.inf)

    def add(self, tile: Tile, key: Tensor, value: Tensor, scale: float) -> None:
        """Merge one tile; `key` and `value` are the shard that the tile's columns are of."""
        found = seen(tile, self.mask)
        if found is Seen.NOTHING:
            return
        query, out, logs = (part.narrow(-2, tile.row, tile.rows) for part in (self._query, self.out, self.logs))
        keys, values = (part.narrow(-2, tile.column, tile.columns) for part in (key, value))
        if _is_fused(tile, self.mask, query, values):
            made = fused_attend(query, keys, values, scale, found is Seen.DIAGONAL)
        else:
            made = attend(scores_of(query, keys, scale, tile, self.mask), values)
        merged = merge((out, logs), made)
        out.copy_(merged[0])
        logs.copy_(merged[1])


class Backward:
    """Gradients of the queries of a shard (and of their mask), tile by tile."""

    def __init__(
        self, query: Tensor, results: tuple[Tensor, Tensor, Tensor], mask: Mask | None, *, wants_mask: bool
    ) -> None:
        self._query, self._mask = query, mask
        gradient, out, logs = results
        self._results = (gradient, out, _finite(logs))
        self._delta = (gradient * out).sum(-1, keepdim=True)
        self.query = torch.zeros_like(query)
        self.mask = torch.zeros_like(wide(mask.values)) if mask is not None and wants_mask else None

    def add(self, tile: Tile, key: Tensor, value: Tensor, scale: float, to: tuple[Tensor, Tensor]) -> None:
        """Add what one tile gives; `to` holds the gradients of the shard of keys and of values."""
        found = seen(tile, self._mask)
        if found is Seen.NOTHING:
            return
        query, delta, total, *results = (
            part.narrow(-2, tile.row, tile.rows) for part in (self._query, self._delta, self.query, *self._results)
        )
        shard = (key.narrow(-2, tile.column, tile.columns), value.narrow(-2, tile.column, tile.columns))
        gradient, out, logs = results
        if _is_fused(tile, self._mask, query, shard[1]):
            made = fused_gradients(query, shard, (gradient, out, logs), scale, found is Seen.DIAGONAL)
        else:
            made = self._gradients(tile, scale, query, shard, (gradient, delta, logs))
        total += made[0]
        for sum_, part in zip(to, made[1:], strict=True):
            sum_.narrow(-2, tile.column, tile.columns).add_(part)

    def _gradients(
        self,
        tile: Tile,
        scale: float,
        query: Tensor,
        shard: tuple[Tensor, Tensor],
        results: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the queries, keys and values of one tile, through its scores."""
        (key, value), (gradient, delta, logs) = shard, results
        weights = torch.exp(scores_of(query, key, scale, tile, self._mask) - logs)
        inner = weights * (gradient @ value.transpose(-2, -1) - delta)
        self._add_mask(tile, inner)
        keys, values = inner.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ gradient
        return inner @ key * scale, keys.sum(2, keepdim=True) * scale, values.sum(2, keepdim=True)

    def _add_mask(self, tile: Tile, inner: Tensor) -> None:
        if self.mask is None or self._mask is None:
            return
        part = Mask(values=self.mask, groups=self._mask.groups).part(tile)
        part += inner.sum_to_size(part.shape)
