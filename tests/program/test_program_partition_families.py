"""Tensor parallelism by graph rewrite: real model classes, every gradient against the eager module.

In 64 bits, so that a difference is a mistake and not rounding; where a class computes its loss in 32 bits the
gradients agree to 1e-6 all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from partition_harness import divided, run_ranks
from partition_specs import SPECS, with_whole_keys
from program_families import FAMILIES, LAYERS
from program_harness import eager, gradient_differences, loss_difference
from torch import Tensor, nn

from distensor.core.problems import SeveralProblemsError
from distensor.nn import DistributedModel, StageMapping
from distensor.program import Captured, capture

_TOLERANCE = 1e-6
GROUPED = ("llama", "qwen2", "olmo2", "gemma2")


def _wide(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _wide(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_wide(value) for value in batch)
    return batch.double() if isinstance(batch, Tensor) and batch.is_floating_point() else batch


@cache
def _captured(name: str) -> tuple[nn.Module, Captured]:
    family = FAMILIES[name]
    module = family.build().double()
    return module, capture(module, _wide(family.batch(*family.sizes[0])), loss=family.loss)


def _check(name: str, spec: Any, ranks: int, stages: int = 1) -> tuple[int, int]:
    """Compare one batch; returns the numbers of collectives and of gathers without a rule."""
    family = FAMILIES[name]
    module, captured = _captured(name)
    made = divided(captured, spec, ranks)
    batch = _wide(family.batch(*family.sizes[1]))
    mapping = DistributedModel(module, stage_mapping=StageMapping(family.stages(stages))).stages if stages > 1 else None
    found = run_ranks(made, batch, mapping)
    expected = eager(module, batch, family.loss)
    assert loss_difference(found.result, expected) < _TOLERANCE
    differences = gradient_differences(found.result, expected)
    worst = max(differences, key=lambda key: differences[key])
    assert differences[worst] < _TOLERANCE, (worst, differences[worst])
    return len(found.calls), len(made.gathers)


_QUICK = ("llama", "qwen2", "olmo2", "gpt2", "transformer_encoder", "mlp")
"""Families that stand for what the others do too; the others run with the slow tests."""


def _families(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _families(SPECS))
def test_two_ranks_compute_what_one_computes(name: str) -> None:
    _, gathers = _check(name, SPECS[name], 2)
    assert gathers == 0


@pytest.mark.parametrize("name", _families(["gpt2", "opt", "gpt_neox", "bert", "vit", "transformer_encoder", "mlp"]))
def test_four_heads_on_three_ranks(name: str) -> None:
    _, gathers = _check(name, SPECS[name], 3)
    assert gathers == 0


@pytest.mark.parametrize("name", _families(GROUPED))
@pytest.mark.parametrize("ranks", [3, 4])
def test_fewer_heads_of_keys_than_ranks_by_replicate(name: str, ranks: int) -> None:
    _, gathers = _check(name, with_whole_keys(SPECS[name]), ranks)
    assert gathers == 0


@pytest.mark.parametrize("name", _families(["llama_tied", "gpt2", "transformer_encoder"]))
def test_partitioned_graphs_are_cut_into_stages(name: str) -> None:
    _check(name, SPECS[name], 2, stages=2)


@pytest.mark.parametrize("name", _families(["llama", "gpt2", "opt"]))
def test_collectives_of_a_layer_are_those_of_megatron(name: str) -> None:
    """Two sums forward and two backward; queries, keys and values share one. Embedding 1, head 1, loss 2."""
    calls, _ = _check(name, SPECS[name], 2)
    assert calls == 4 * LAYERS + 4


def test_too_few_heads_are_refused_by_name() -> None:
    """All that is wrong in one message, the same of every layer once."""
    _, captured = _captured("llama")
    with pytest.raises(SeveralProblemsError) as caught:
        divided(captured, SPECS["llama"], 3)
    assert [str(problem) for problem in caught.value.problems] == [
        f"'model.layers.*.self_attn.{name}_proj.weight' is used in units of 8 along dim 0 "
        "(in 'model.layers.*.self_attn'): 2 units for tensor_parallel=3; "
        "use Replicate() for it, or at most tensor_parallel=2"
        for name in "kv"
    ]


def test_32_bits_agree_as_a_whole() -> None:
    from program_harness import whole_difference

    family = FAMILIES["llama"]
    module = family.build()
    batch = family.batch(*family.sizes[0])
    found = run_ranks(divided(capture(module, batch), SPECS["llama"], 2), batch)
    assert whole_difference(found.result, eager(module, batch, None)) < _TOLERANCE


def test_a_spec_of_nothing_leaves_the_graph_alone() -> None:
    module, captured = _captured("mlp")
    made = divided(captured, {}, 2)
    assert made.layouts == {}
    assert [node.op for node in made.captured(tp=1).nodes] == [node.op for node in captured.nodes]
    batch = _wide(FAMILIES["mlp"].batch(5, 1))
    found = run_ranks(made, batch)
    assert found.calls == []
    assert torch.equal(
        found.result.gradients["0.weight"], eager(module, batch, FAMILIES["mlp"].loss).gradients["0.weight"]
    )
