"""Attention over a cut sequence: all three methods against attention over the whole one, on ranks that are threads."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from distensor.core.compute import ContextAttention as Method
from distensor.core.parallel import Axis
from distensor.core.sequence import HeadTail, Tile, tiles
from distensor.program import attention, attention_tiles
from distensor.program.axes import AxisGroup
from distensor.testing.axes import Grid

METHODS = tuple(Method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    ranks: int = 2
    length: int = 8
    heads: int = 4
    groups: int = 4
    causal: bool = True
    mask: str | None = None
    dtype: torch.dtype = torch.float32
    weights: tuple[int, ...] = ()
    scale: float | None = None
    width: int = 6
    """Of the values; where it is that of the keys (6), CPUs have a fused kernel."""


def _inputs(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.length + case.ranks)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    batch, length = 2, case.length
    made = {
        "query": draw(batch, case.heads, length, 6),
        "key": draw(batch, case.groups, length, 6),
        "value": draw(batch, case.groups, length, case.width),
        "gradient": draw(batch, case.heads, length, case.width),
    }
    if case.mask == "padding":
        made["mask"] = (torch.arange(length) < length - 2).expand(batch, 1, 1, length).clone()
    elif case.mask == "window":
        place = torch.arange(length)
        seen = place[:, None] - place[None, :]
        made["mask"] = ((seen >= 0) & (seen < 3)).expand(batch, 1, length, length)
    elif case.mask == "blind":
        made["mask"] = torch.rand(batch, 1, length, length, generator=generator) < 0.6
        made["mask"][:, :, 1] = False
    elif case.mask == "bias":
        made["mask"] = draw(1, case.heads, length, length)
    elif case.mask == "flat":
        made["mask"] = torch.tril(torch.ones(length, length, dtype=torch.bool))
    return made


def _whole(case: Case, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In 64 bits, by torch."""
    names = [name for name in ("query", "key", "value", "mask") if name in made]
    leaves = {name: made[name] if made[name].dtype is torch.bool else made[name].double() for name in names}
    for value in leaves.values():
        value.requires_grad_(value.is_floating_point())
    mask = leaves.get("mask")
    out = functional.scaled_dot_product_attention(
        leaves["query"], leaves["key"], leaves["value"], mask, 0.0, case.causal, scale=case.scale, enable_gqa=True
    )
    out.backward(made["gradient"].double())
    return {"out": out.detach(), **{name: value.grad for name, value in leaves.items() if value.grad is not None}}


def _cut(case: Case, method: Method, made: Mapping[str, Tensor], grid: Grid) -> dict[str, Tensor]:
    division = HeadTail(ranks=case.ranks, weights=case.weights)
    cuts = division.cuts(case.length)
    lengths = [stop - start for start, stop in itertools.pairwise(cuts)]

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> dict[str, Tensor]:
        mine = torch.tensor(division.positions(case.length, place[Axis.CP]), dtype=torch.int64)
        local = {name: made[name][:, :, mine].clone() for name in ("query", "key", "value", "gradient")}
        mask = made.get("mask")
        if mask is not None and method is not Method.ULYSSES and mask.shape[-2] > 1:
            mask = mask[..., mine, :]
        if mask is not None:
            local["mask"] = mask.clone()
        leaves = {name: value for name, value in local.items() if name != "gradient" and value.is_floating_point()}
        for value in leaves.values():
            value.requires_grad_()
        out = attention.attention(
            groups[Axis.CP], local["query"], local["key"], local["value"], local.get("mask"),
            case.causal, case.scale, lengths, list(division.owners), method,
        )  # fmt: skip
        assert out.dtype is case.dtype
        out.backward(local["gradient"])
        found = {name: value.grad for name, value in leaves.items() if value.grad is not None}
        return {"out": out.detach(), **found}

    parts = grid.run(run)
    restore = torch.tensor(division.restore(case.length), dtype=torch.int64)
    joined = {name: torch.cat([part[name] for part in parts], 2)[:, :, restore] for name in parts[0] if name != "mask"}
    if "mask" in parts[0]:
        masks = [part["mask"] for part in parts]
        joined["mask"] = sum(masks[1:], masks[0]) if method is Method.ULYSSES else torch.cat(masks, 2)[:, :, restore]
    return joined


def _difference(case: Case, method: Method) -> float:
    made = _inputs(case)
    expected = _whole(case, made)
    found = _cut(case, method, made, Grid({Axis.CP: case.ranks}))
    assert found.keys() == expected.keys()
    # A lone position has no gradient by its scores: what is left there is the rounding of terms that cancel, and those
    # are of the size of the other results.
    least = 0.2 * max(value.norm() for value in expected.values())
    return max(
        float((found[name].double() - value).norm() / value.norm().clamp(min=least)) for name, value in expected.items()
    )


CASES: Mapping[str, Case] = {
    "causal": Case(),
    "causal, not divisible": Case(ranks=3, length=13),
    "causal, one position a rank": Case(ranks=4, length=4),
    "both ways": Case(causal=False, ranks=4, length=9),
    "grouped": Case(groups=2, length=11),
    "one key head": Case(groups=1, ranks=3, length=12, heads=3),
    "fewer key heads than ranks": Case(heads=4, groups=2, ranks=4, length=16),
    "heads that do not divide": Case(heads=6, groups=3, ranks=4, length=16),
    "padding": Case(causal=False, mask="padding", length=10),
    "window": Case(causal=False, mask="window", length=17, groups=2),
    "a row that sees nothing": Case(causal=False, mask="blind", length=9),
    "a learnt bias": Case(causal=False, mask="bias", length=9, ranks=3, groups=2),
    "a mask of two dims": Case(causal=False, mask="flat", length=9),
    "a scale": Case(scale=0.3),
    "weights": Case(weights=(3, 1), length=16),
    "fewer positions than ranks": Case(ranks=3, length=2),
    "a lone position": Case(ranks=1, length=1, heads=2, groups=1, causal=False),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_attention_over_the_whole(name: str, method: Method) -> None:
    """With the fused kernel (where there is no mask) and without it."""
    for width in (6, 5):
        assert _difference(dataclasses.replace(CASES[name], width=width), method) <= 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_sums_of_16_bit_values_are_made_in_32(method: Method) -> None:
    """What remains is the rounding of inputs of the kernel and of results: 2**-8 relative at most each."""
    assert _difference(Case(dtype=torch.bfloat16, length=64, groups=1), method) <= 6e-3


@pytest.mark.parametrize("method", [Method.ALL_GATHER, Method.RING])
def test_in_several_tiles(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE", 3)
    monkeypatch.setattr(attention, "FUSED_TILE", 4)
    for width in (6, 5):
        assert _difference(Case(length=19, groups=2, width=width), method) <= 1e-6
    assert _difference(Case(length=19, causal=False, mask="bias"), method) <= 1e-6


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_sizes(data: st.DataObject) -> None:
    ranks, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    case = Case(
        ranks=ranks,
        groups=groups,
        heads=groups * data.draw(st.integers(1, 3)),
        length=data.draw(st.integers(ranks, 24)),
        causal=data.draw(st.booleans()),
    )
    method = data.draw(st.sampled_from(METHODS))
    assert _difference(case, method) <= 1e-6


@pytest.mark.parametrize("method", [Method.ALL_GATHER, Method.RING])
@pytest.mark.parametrize(("length", "ranks"), [(8, 2), (16, 4), (24, 3), (48, 8)])
def test_every_rank_computes_as_many_pairs(
    length: int, ranks: int, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where scores are computed, forward and backward; contiguous shards would differ by up to 1.86."""
    computed: dict[str, list[Tile]] = {}
    scores_of = attention_tiles.scores_of

    def counting(query: Tensor, key: Tensor, scale: float, tile: Tile, mask: Any) -> Tensor:
        computed.setdefault(threading.current_thread().name, []).append(tile)
        return scores_of(query, key, scale, tile, mask)

    monkeypatch.setattr(attention_tiles, "scores_of", counting)
    monkeypatch.setattr(attention, "TILE", length // ranks // 2)
    case = Case(length=length, ranks=ranks, width=5)
    _cut(case, method, _inputs(case), Grid({Axis.CP: ranks}))
    expected = HeadTail(ranks=ranks).causal_pairs(length, 0)
    assert [sum(tile.pairs for tile in found) for found in computed.values()] == [2 * expected] * ranks
    assert len({sum(tile.rows * tile.columns for tile in found) for found in computed.values()}) == 1


@pytest.mark.parametrize("method", [Method.ALL_GATHER, Method.RING])
def test_causality_written_as_a_mask_costs_the_same(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face's models do it: the mask is looked into, nothing unseen is computed, the work is even."""
    done: dict[str, int] = {}
    add = attention_tiles.Running.add

    def watching(self: Any, tile: Tile, *rest: Any) -> None:
        found = attention_tiles.seen(tile, self.mask)
        assert found is not attention_tiles.Seen.SOME
        whole = found is attention_tiles.Seen.EVERYTHING
        pairs = dataclasses.replace(tile, is_cut=not whole).pairs if found is not attention_tiles.Seen.NOTHING else 0
        done[threading.current_thread().name] = done.get(threading.current_thread().name, 0) + pairs
        add(self, tile, *rest)

    monkeypatch.setattr(attention_tiles.Running, "add", watching)
    case = Case(length=24, ranks=3, causal=False, mask="flat", groups=2)
    assert _difference(case, method) <= 1e-6
    assert list(done.values()) == [100] * 3


def test_ring_never_holds_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest shard of keys that tiles are taken from is one rank's."""
    seen: list[int] = []
    add = attention_tiles.Running.add

    def watching(self: Any, tile: Tile, key: Tensor, *rest: Any) -> None:
        seen.append(key.shape[-2])
        add(self, tile, key, *rest)

    monkeypatch.setattr(attention_tiles.Running, "add", watching)
    case = Case(length=16, ranks=4)
    for method, most in ((Method.RING, 4), (Method.ALL_GATHER, 16)):
        seen.clear()
        _cut(case, method, _inputs(case), Grid({Axis.CP: 4}))
        assert max(seen) == most


MESSAGES = {
    Method.ALL_GATHER: ["all_gather", "reduce_scatter"],
    Method.RING: ["shift"] * (3 + 2 * 3 + 1),
    Method.ULYSSES: ["all_to_all"] * 6,
}


@pytest.mark.parametrize("method", METHODS)
def test_messages_of_each_method(method: Method) -> None:
    grid = Grid({Axis.CP: 4})
    case = Case(length=16, ranks=4)
    _cut(case, method, _inputs(case), grid)
    (meeting,) = grid.meetings.values()
    assert [call.split()[0] for call in meeting.calls] == MESSAGES[method]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 9))
def test_tiles_cover_every_pair_once(length: int, ranks: int, size: int) -> None:
    division = HeadTail(ranks=ranks)
    everything = [(0, length)]
    for rank in range(ranks):
        found = list(tiles(division.chunks(length, rank), everything, causal=True, size=size))
        assert sum(tile.pairs for tile in found) == division.causal_pairs(length, rank)
        covered = sorted(
            (tile.query + row, tile.key + column)
            for tile in found
            for row, column in itertools.product(range(tile.rows), range(tile.columns))
            if tile.key + column <= tile.query + row
        )
        assert covered == [
            (query, key) for query in sorted(division.positions(length, rank)) for key in range(query + 1)
        ]


def test_shapes_that_do_not_fit_are_named() -> None:
    (group,) = Grid({Axis.CP: 1}).groups({Axis.CP: 0}).values()
    query, key = torch.zeros(1, 4, 3, 2), torch.zeros(1, 3, 3, 2)
    with pytest.raises(ValueError, match=r"\[1, 4, 3, 2\], \[1, 3, 3, 2\]"):
        attention.attention(group, query, key, key, None, True, None, [3, 0], [0, 0], "ring")
