"""Random small modules under random placements: every gradient against the eager module, in 64 bits.

What cannot be cut so is refused by name; nothing else may happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from partition_harness import run_ranks
from program_harness import eager, gradient_differences, loss_difference
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distensor.core.errors import UserError
from distensor.program import capture, partition

_EXACT = 1e-9
_WIDTHS = (4, 6, 8, 12)
Step = tuple[str, int, int]


def _scores(x: Tensor) -> Tensor:
    """Positions attend to each other, with two heads where the width is even."""
    heads = 2 if x.shape[-1] % 2 == 0 else 1
    h = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    mixed = (h @ h.transpose(-1, -2) / 8).softmax(-1) @ h
    return mixed.transpose(1, 2).reshape(x.shape)


def _attended(x: Tensor) -> Tensor:
    h = x.view(x.shape[0], x.shape[1], -1, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)


def _halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


def _gated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (first.sigmoid() * second).repeat_interleave(2, -1)


PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1) * 3,
    "log_softmax": lambda x: x.log_softmax(-1),
    "norm": _normed,
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "scores": _scores,
    "attention": _attended,
    "halves": _halves,
    "gated": _gated,
    "flip": lambda x: x.flip(-1),
    "late": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "center": lambda x: x - x.mean((1, 2), keepdim=True),
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "pairs": lambda x: x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(2),
    "stack": lambda x: torch.stack([x, x * 2], 2).sum(2),
    "sum": lambda x: x + x.sum(-1, keepdim=True) + x.logsumexp(-1, keepdim=True),
    "square": lambda x: (x @ x.transpose(-1, -2)) @ x / 16,
}


@dataclass(frozen=True)
class Recipe:
    """Steps in order: ("linear", width, has bias), ("scale", 0, 0), ("add", which earlier value, 0) or a plain one."""

    steps: Sequence[Step]


class Built(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        generator = torch.Generator().manual_seed(len(recipe.steps))
        width = 8
        for at, (kind, first, second) in enumerate(recipe.steps):
            if kind == "linear":
                self._add(f"w{at}", (first, width), generator)
                if second:
                    self._add(f"b{at}", (first,), generator)
                width = first
            elif kind == "scale":
                self._add(f"s{at}", (width,), generator)

    def _add(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
        value = torch.randn(shape, generator=generator).double() * 0.5
        self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for at, (kind, first, second) in enumerate(self.recipe.steps):
            if kind == "linear":
                x = F.linear(x, getattr(self, f"w{at}"), getattr(self, f"b{at}") if second else None)
            elif kind == "scale":
                x = x * getattr(self, f"s{at}")
            elif kind == "add":
                other = seen[first % len(seen)]
                x = x + other if other.shape == x.shape else x
            else:
                x = PLAIN[kind](x)
            seen.append(x)
        return x


@st.composite
def recipes(draw: st.DrawFn) -> tuple[Recipe, dict[str, int | None], int]:
    first = ("linear", draw(st.sampled_from(_WIDTHS)), draw(st.integers(0, 1)))
    linear = st.tuples(st.just("linear"), st.sampled_from(_WIDTHS), st.integers(0, 1))
    scale = st.tuples(st.just("scale"), st.just(0), st.just(0))
    add = st.tuples(st.just("add"), st.integers(0, 5), st.just(0))
    plain = st.tuples(st.sampled_from(sorted(PLAIN)), st.just(0), st.just(0))
    steps = draw(st.lists(st.one_of(plain, plain, linear, scale, add), min_size=1, max_size=6))
    recipe = Recipe([first, *steps])
    placements: dict[str, int | None] = {}
    for name, value in Built(recipe).named_parameters():
        choices = [None, *range(value.ndim)] if name != "w0" else [0]
        placements[name] = draw(st.sampled_from(choices))
    return recipe, placements, draw(st.integers(2, 3))


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    del batch
    flat = outputs.reshape(-1)
    return (flat.square() * (torch.arange(flat.shape[0]) % 5 + 1)).mean()


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(rows)).double()


def _check(recipe: Recipe, placements: Mapping[str, int | None], ranks: int) -> None:
    module = Built(recipe)
    captured = capture(module, _batch(3), loss=_loss, loss_weight="rows")
    try:
        made = partition(captured, placements, tensor=ranks)
    except UserError as error:
        refused = str(error)
        event("refused")
    else:
        refused = ""
    if refused:
        assert "Replicate()" in refused
        return
    event("gathers" if made.gathers else "no gathers")
    found = run_ranks(made, _batch(2))
    expected = eager(module, _batch(2), _loss)
    assert loss_difference(found.result, expected) < _EXACT
    differences = gradient_differences(found.result, expected)
    assert max(differences.values()) < _EXACT, differences


_SETTINGS: Mapping[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=12, derandomize=True, **_SETTINGS)
@given(recipes())
def test_random_modules(drawn: tuple[Recipe, dict[str, int | None], int]) -> None:
    _check(*drawn)


@pytest.mark.slow
@settings(max_examples=150, **_SETTINGS)
@given(recipes())
def test_many_random_modules(drawn: tuple[Recipe, dict[str, int | None], int]) -> None:
    _check(*drawn)
