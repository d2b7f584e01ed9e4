"""Random small modules over a sequence, cut among random numbers of ranks: every gradient against the eager module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from context_harness import Ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_harness import eager, gradient_differences, loss_difference
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from distensor.program import capture, partition

_EXACT = 1e-9
WIDTH = 4


def _attention(**options: Any) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads.tanh(), heads, **options).transpose(1, 2).flatten(2)

    return attend


def _masked(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    seen = (place[:, None] - place[None, :]).abs() < 3
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=seen[None, None])[:, 0]


def _scores(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) / 4).softmax(-1) @ x


STEPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "causal": _attention(is_causal=True),
    "both ways": _attention(),
    "masked": _masked,
    "scores": _scores,
    "square": lambda x: x @ (x.transpose(1, 2) @ x) / 8,
    "later": lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "window": lambda x: F.pad(x[:, 1:-1] * 2, (0, 0, 1, 1)),
    "steps": lambda x: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "two windows": lambda x: F.pad(x[:, 2:][:, :-1].tanh(), (0, 0, 2, 1)) + x,
    "first": lambda x: x * x[:, 0].unsqueeze(1),
    "last": lambda x: x + x[:, -1:] - x.select(1, -1)[:, None].tanh(),
    "center": lambda x: x - x.mean(1, keepdim=True) + x.sum((0, 1)) / 9,
    "over positions": lambda x: x.softmax(1) * 3 + x.cumsum(1) / 9,
    "flat": lambda x: x.reshape(-1, 2, 2).flip(1).flatten(1).view(x.shape),
    "rows first": lambda x: x.transpose(0, 1).reshape(-1, WIDTH).tanh().view(x.shape[1], -1, WIDTH).permute(1, 0, 2),
    "stacked": lambda x: torch.stack([x, x * 2], 1).unbind(1)[1],
    "repeated": lambda x: x[:, None].expand(-1, 3, -1, -1).sum(1).repeat(1, 1, 2)[..., :WIDTH],
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x).sigmoid() @ x / 4,
    "twice each": lambda x: x.repeat_interleave(2, 1).flatten(0, 1).unflatten(0, (x.shape[0], -1, 2)).sum(2),
    "places": lambda x: x[..., [3, 1, 0, 2]],
    "position": lambda x: x * torch.arange(x.shape[1]).sub(2).cos()[:, None],
    "neighbours": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
}


class Built(nn.Module):
    """The steps in order; "linear", "scale", "table" and "add" (an earlier value) are made of parameters."""

    def __init__(self, steps: Sequence[str]) -> None:
        super().__init__()
        self.steps = steps
        generator = torch.Generator().manual_seed(len(steps))
        shapes = {"linear": (WIDTH, WIDTH), "scale": (WIDTH,), "table": (30, WIDTH)}
        for at, step in enumerate(steps):
            if step in shapes:
                value = torch.randn(shapes[step], generator=generator).double() * 0.5
                self.register_parameter(f"p{at}", nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for at, step in enumerate(self.steps):
            weight = getattr(self, f"p{at}", None)
            if step == "linear":
                x = F.linear(x, weight)
            elif step == "scale":
                x = x * weight
            elif step == "table":
                x = x + weight[1 : x.shape[1] + 1]
            elif step == "add":
                x = x + first
            else:
                x = STEPS[step](x)
        return x


def _loss(outputs: Tensor, batch: Any) -> Tensor:
    del batch
    flat = outputs.reshape(-1)
    return (flat.square() * (torch.arange(flat.shape[0]) % 5 + 1)).mean()


def _batch(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(rows)).double()


recipes = st.tuples(
    st.lists(st.sampled_from([*sorted(STEPS), "linear", "scale", "table", "add"]), min_size=1, max_size=6),
    st.integers(2, 3),
    st.sampled_from(["all_gather", "ring"]),
    st.integers(6, 13),
)


def _check(recipe: tuple[list[str], int, str, int]) -> None:
    steps, ranks, method, length = recipe
    module = Built(["linear", *steps])
    captured = capture(module, _batch(3, 8), loss=_loss, loss_weight="rows")
    made = partition(captured, {}, context=ranks, attention=method)
    expected = eager(module, _batch(2, length), _loss)
    found = Ranks(module, made).whole(_batch(2, length))
    assert loss_difference(found, expected) < _EXACT
    differences = gradient_differences(found, expected)
    assert max(differences.values()) < _EXACT, differences


_SETTINGS: Mapping[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=12, derandomize=True, **_SETTINGS)
@given(recipes)
def test_random_modules(recipe: tuple[list[str], int, str, int]) -> None:
    _check(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_each_step_alone(step: str) -> None:
    _check(([step, "linear"], 3, "all_gather", 11))


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, **_SETTINGS)
@given(recipes)
def test_many_random_modules(recipe: tuple[list[str], int, str, int]) -> None:
    _check(recipe)
