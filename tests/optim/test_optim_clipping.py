"""The norm of a model in parts, against torch's norm of the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from distensor.core.errors import ConfigError
from distensor.optim.clipping import NormType, clip_factor, parse_norm_type, partial_norm, whole_norm

KINDS = [(1.0, NormType.ONE), (2.0, NormType.TWO), ("inf", NormType.INF), (math.inf, NormType.INF), (2, NormType.TWO)]


@pytest.mark.parametrize(("value", "kind"), KINDS)
def test_norm_types_are_read(value: Any, kind: NormType) -> None:
    assert parse_norm_type(value) is kind


@pytest.mark.parametrize("value", [0, 3.0, -1, True, "2", None, math.nan])
def test_other_norm_types_are_refused_by_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"norm_type=.*expected 1\.0, 2\.0 or 'inf'"):
        parse_norm_type(value)


@pytest.mark.parametrize(("value", "kind"), KINDS[:3])
def test_parts_of_stages_make_the_norm_of_the_whole_model(value: float | str, kind: NormType) -> None:
    torch.manual_seed(0)
    stages = [[torch.randn(3, 4), torch.randn(5) * 100], [], [torch.randn(7) * 0.01, torch.zeros(0)]]
    parts = [partial_norm(stage, kind) for stage in stages]
    combined = max(parts) if kind is NormType.INF else sum(parts)
    gradients = [gradient for stage in stages for gradient in stage if gradient.numel()]
    expected = float(torch.nn.utils.get_total_norm([g.double() for g in gradients], float(value)))
    assert whole_norm(combined, kind) == pytest.approx(expected, rel=1e-12)


def test_two_stages_of_very_different_norms() -> None:
    """The norms of the two stages are 4.472 and 447.214; of the model it is 447.236."""
    stages = [[torch.full((20,), 1.0)], [torch.full((20,), 100.0)]]
    parts = [partial_norm(stage, NormType.TWO) for stage in stages]
    assert [round(whole_norm(part, NormType.TWO), 3) for part in parts] == [4.472, 447.214]
    norm = whole_norm(sum(parts), NormType.TWO)
    assert round(norm, 3) == 447.236
    assert clip_factor(norm, 1.0) == pytest.approx(1 / 447.236, rel=1e-6)
    assert clip_factor(norm, 1000.0) == clip_factor(norm, None) == 1.0


@pytest.mark.parametrize("kind", NormType)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_none(kind: NormType, bad: float) -> None:
    assert not math.isfinite(partial_norm([torch.ones(2), torch.tensor([1.0, bad]), torch.ones(2)], kind))


def test_long_gradients_are_added_in_rows_without_losing_digits() -> None:
    """A million squares in float32 alone would be 1e-6 off."""
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(size, generator=generator) for size in (1 << 20, (1 << 14) + 1, 5000, 3)]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert partial_norm(gradients, NormType.TWO) == pytest.approx(exact, rel=5e-8)
    matrices = [gradient[: 1 << 14].view(128, 128).t() for gradient in gradients[:1]]
    assert partial_norm(matrices, NormType.TWO) == pytest.approx(float(matrices[0].double().square().sum()), rel=1e-12)
    mixed = [gradients[1], gradients[3].bfloat16(), gradients[2].double()]
    exact = sum(float(gradient.double().square().sum()) for gradient in mixed)
    assert partial_norm(mixed, NormType.TWO) == pytest.approx(exact, rel=5e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_that_float32_does_not_hold_are_taken_in_double_precision(scale: float) -> None:
    gradient = torch.full((1 << 15,), scale)
    assert partial_norm([gradient], NormType.TWO) == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert partial_norm([gradient * 0], NormType.TWO) == 0.0
