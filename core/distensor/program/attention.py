"""Attention over a sequence that is cut among the ranks of an axis, with its gradients.

Each rank holds the queries, keys and values of its chunks (`Pieces`: head-tail for causal attention). Three methods
give the same numbers:

- all_gather: every rank gets all keys and values once; their gradients go back in one reduce-scatter (as in Llama 3,
  Dubey et al. 2024, section 3.3.2). Fewest messages.
- ring: keys and values go around, merged by log-sum-exp; no rank ever holds more than its own and its neighbour's
  (Liu et al. 2023, "Ring Attention"). In the backward pass their gradients go around with them.
- ulysses: queries, keys and values change from chunks of the sequence to heads, and back (Jacobs et al. 2023,
  "DeepSpeed Ulysses"). Key heads that several ranks need are sent to each of them.

Shapes: query [B, H, t, D], key [B, G, t, D], value [B, G, t, E], mask [b, h, t or 1, s or 1]: rows of this rank
(ulysses: of the whole sequence), columns of the whole sequence. Sums are made in 32 bits at least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from distensor.core.compute import ContextAttention
from distensor.core.layouts import even_lengths
from distensor.core.sequence import Tile, tiles
from distensor.program.attention_fused import FUSED_TILE, is_fused_for
from distensor.program.attention_tiles import TILE, Backward, Mask, Running, folded, wide
from distensor.program.axes import AxisGroup
from distensor.program.collectives import Pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is attended to what: the cut of the sequence and the rules of the scores."""

    group: AxisGroup
    pieces: Pieces
    causal: bool
    scale: float

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the chunks of a rank, by position."""
        stops = list(itertools.accumulate(self.pieces.lengths))
        found = zip(self.pieces.owners, self.pieces.lengths, stops, strict=True)
        return tuple((stop - length, stop) for owner, length, stop in found if owner == rank)

    def tiles(self, keys: Sequence[tuple[int, int]], size: int) -> Iterator[Tile]:
        return tiles(self.chunks(self.group.rank), keys, causal=self.causal, size=size)

    def all_keys(self, mask: Tensor | None) -> list[tuple[int, int]]:
        """The whole sequence; under a mask chunk by chunk, where it may change from nothing to everything."""
        cuts = [0, *itertools.accumulate(self.pieces.lengths)]
        return [(0, cuts[-1])] if mask is None else list(itertools.pairwise(cuts))


def attention(
    group: AxisGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    lengths: Sequence[int],
    owners: Sequence[int],
    method: str,
) -> Tensor:
    """Outputs [B, H, t, E] of the queries of this rank, in their dtype."""
    pieces = Pieces(2, 1, 1, lengths, owners, group.size)
    pieces.check()
    _check_shapes(query, key, value, pieces.sizes()[group.rank])
    if query.device.type == "meta":  # the shape check; a foreign program must not make it walk over tiles
        return query.new_empty((*query.shape[:3], value.shape[3]))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    problem = Problem(group=group, pieces=pieces, causal=is_causal, scale=factor)
    if method == ContextAttention.ULYSSES:
        return _ulysses(problem, query, key, value, attn_mask)
    function = _FUNCTIONS[ContextAttention(method)]
    return function.apply(query, key, value, attn_mask, problem)  # type: ignore[no-any-return,no-untyped-call]


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, held: int) -> None:
    fits = query.ndim == 4 and query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]
    if not fits or query.shape[1] % max(key.shape[1], 1) or query.shape[2:] != key.shape[2:] or query.shape[2] != held:
        shapes = f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        raise ValueError(f"queries, keys and values of {shapes} are no [batch, heads, sequence, width] that fit")


def _joined(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key, value], -1)


class _Tiled(torch.autograd.Function):
    """What all_gather and ring share: they differ in how shards of keys come by."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, problem: Problem
    ) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def keep(context: Any, running: Running, problem: Problem, tensors: Sequence[Tensor | None]) -> Tensor:
        query = tensors[0]
        assert query is not None
        context.problem, context.seen = problem, running.mask
        context.save_for_backward(*tensors, running.out, running.logs)
        return running.out.flatten(1, 2).to(query.dtype)


def _running(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Running:
    groups = key.shape[1]
    return Running(folded(query, groups), value.shape[-1], Mask.of(mask, groups))


def _backward(context: Any, gradient: Tensor, groups: int) -> Backward:
    """What remains to be added up, from what `keep` kept: queries first, mask, outputs and logs last."""
    query, *_, out, logs = context.saved_tensors
    results = (folded(gradient, groups), out, logs)
    return Backward(folded(query, groups), results, context.seen, wants_mask=context.needs_input_grad[3])


def _tile_size(query: Tensor, value: Tensor, mask: Tensor | None) -> int:
    """Masks are looked at, and scores written down, in tiles that fit into a cache."""
    return FUSED_TILE if mask is None and is_fused_for(query, value) else TILE


def _unfolded(gradient: Tensor, like: Tensor) -> Tensor:
    """[B, G, R, T, D] -> [B, H, T, D] in the dtype of `like`."""
    return gradient.flatten(1, 2).to(like.dtype)


def _halves(joined: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, 1, S, ..] of one message, in 32 bits at least."""
    opened = wide(joined).unsqueeze(2)
    return opened[..., :width], opened[..., width:]


def _mask_gradient(backward: Backward, mask: Tensor | None) -> Tensor | None:
    if mask is None or backward.mask is None:
        return None
    return backward.mask.reshape(mask.shape).to(mask.dtype)


class _AllGather(_Tiled):
    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, problem: Problem
    ) -> Tensor:
        joined = problem.pieces.gather(problem.group, _joined(key, value))
        keys, values = _halves(joined, key.shape[-1])
        running = _running(query, key, value, mask)
        size = _tile_size(query, value, mask)
        for tile in problem.tiles(problem.all_keys(mask), size):
            running.add(tile, keys, values, problem.scale)
        return _Tiled.keep(context, running, problem, (query, joined, mask))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, joined, mask, *_ = context.saved_tensors
        problem, width = context.problem, query.shape[-1]
        keys, values = _halves(joined, width)
        backward = _backward(context, gradients[0], joined.shape[1])
        size = _tile_size(query, values, mask)
        total = torch.zeros_like(wide(joined))
        to = _halves(total, width)
        for tile in problem.tiles(problem.all_keys(mask), size):
            backward.add(tile, keys, values, problem.scale, to)
        local = problem.pieces.scatter(problem.group, total).to(joined.dtype)
        found = (_unfolded(backward.query, query), local[..., :width], local[..., width:])
        return (*found, _mask_gradient(backward, mask), None)


class _Ring(_Tiled):
    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, problem: Problem
    ) -> Tensor:
        running = _running(query, key, value, mask)
        size = _tile_size(query, value, mask)
        shard = _joined(key, value)
        for step in range(problem.group.size):
            shard = _passed(problem, shard, step) if step else shard
            keys, values = _halves(shard, key.shape[-1])
            for tile in problem.tiles(problem.chunks(_origin(problem, step)), size):
                running.add(tile, keys, values, problem.scale)
        return _Tiled.keep(context, running, problem, (query, key, value, mask))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *_ = context.saved_tensors
        problem, width = context.problem, key.shape[-1]
        backward = _backward(context, gradients[0], key.shape[1])
        size = _tile_size(query, value, mask)
        shard = _joined(key, value)
        total = torch.zeros_like(wide(shard))
        for step in range(problem.group.size):
            if step:
                shard, total = _passed(problem, shard, step), _passed(problem, total, step)
            keys, values = _halves(shard, width)
            to = _halves(total, width)
            for tile in problem.tiles(problem.chunks(_origin(problem, step)), size):
                backward.add(tile, keys, values, problem.scale, to)
        home = _passed(problem, total, problem.group.size).to(shard.dtype)
        found = (_unfolded(backward.query, query), home[..., :width], home[..., width:])
        return (*found, _mask_gradient(backward, mask), None)


_FUNCTIONS: Mapping[ContextAttention, type[_Tiled]] = {
    ContextAttention.ALL_GATHER: _AllGather,
    ContextAttention.RING: _Ring,
}


def _origin(problem: Problem, step: int) -> int:
    """Whose keys are here at a step."""
    return (problem.group.rank - step) % problem.group.size


def _passed(problem: Problem, shard: Tensor, step: int) -> Tensor:
    """One step around the ring: what arrives is of the rank before."""
    length = problem.pieces.sizes()[_origin(problem, step)]
    return problem.group.shift(shard, 1, (*shard.shape[:2], length, shard.shape[3]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Which heads each rank gets: [start, stop) by rank, not always apart from each other. `count` of them in all."""

    count: int
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def of_queries(count: int, ranks: int) -> Heads:
        stops = list(itertools.accumulate(even_lengths(count, ranks)))
        return Heads(count=count, ranges=tuple(zip([0, *stops], stops, strict=False)))

    def of_keys(self, groups: int) -> Heads:
        """The key heads that these query heads look at."""
        repeats = self.count // groups
        return Heads(count=groups, ranges=tuple((a // repeats, -(-b // repeats)) for a, b in self.ranges))

    def to_heads(self, problem: Problem, value: Tensor) -> Tensor:
        """[B, H, t, D] of the own chunks -> [B, own heads, S, D]."""
        group, sizes = problem.group, problem.pieces.sizes()
        start, stop = self.ranges[group.rank]
        parts = [value[:, first:last] for first, last in self.ranges]
        shapes = [(value.shape[0], stop - start, size, value.shape[3]) for size in sizes]
        joined = torch.cat(group.all_to_all(parts, shapes), 2)
        return problem.pieces.ordered(joined, 2)

    def to_sequence(self, problem: Problem, value: Tensor) -> Tensor:
        """[B, own heads, S, D] -> [B, H, t, D] of the own chunks; heads that came from several ranks are added."""
        group, size = problem.group, problem.pieces.sizes()[problem.group.rank]
        parts = [problem.pieces.pick(rank, value) for rank in range(group.size)]
        shapes = [(value.shape[0], stop - start, size, value.shape[3]) for start, stop in self.ranges]
        total = value.new_zeros((value.shape[0], self.count, size, value.shape[3]))
        for (start, stop), part in zip(self.ranges, group.all_to_all(parts, shapes), strict=True):
            total[:, start:stop] += part
        return total


class _Exchange(torch.autograd.Function):
    """An all-to-all; its gradient is the one the other way."""

    @staticmethod
    def forward(context: Any, value: Tensor, heads: Heads, problem: Problem, to_heads: bool) -> Tensor:
        context.heads, context.problem, context.to_heads = heads, problem, to_heads
        return heads.to_heads(problem, value) if to_heads else heads.to_sequence(problem, value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        heads, gradient = context.heads, gradients[0]
        if not context.to_heads:
            return heads.to_heads(context.problem, gradient), None, None, None
        return heads.to_sequence(context.problem, wide(gradient)).to(gradient.dtype), None, None, None


_exchange: Callable[..., Tensor] = _Exchange.apply


def _ulysses(problem: Problem, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    heads = Heads.of_queries(query.shape[1], problem.group.size)
    key_heads = heads.of_keys(key.shape[1])
    (start, stop), (first, _) = heads.ranges[problem.group.rank], key_heads.ranges[problem.group.rank]
    queries = _exchange(query, heads, problem, True)
    both = _exchange(_joined(key, value), key_heads, problem, True)
    repeats = query.shape[1] // key.shape[1]
    index = torch.tensor([head // repeats - first for head in range(start, stop)], device=query.device)
    both = both.index_select(1, index.long())
    keys, values = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, start, stop - start)
    out = functional.scaled_dot_product_attention(queries, keys, values, mask, 0.0, problem.causal, scale=problem.scale)
    return _exchange(out, heads, problem, False)


ATTENTION: Mapping[str, Callable[..., Any]] = {"dist.attention.default": attention}
"""Takes the group of its axis first."""
