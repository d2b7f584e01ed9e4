"""`suggest_sharding`: the text it prints, pasted, gives the numbers of one process at tensor_parallel=2."""

from __future__ import annotations

from typing import Any

import pytest
from partition_harness import divided, run_ranks
from partition_specs import SPECS
from program_families import FAMILIES
from program_harness import eager, gradient_differences, loss_difference
from torch import nn

from distensor.nn import Shard, ShardingSpec, suggest_sharding
from distensor.program import capture

TOLERANCE = 1e-6
QUICK = ("llama", "gpt2", "opt")
NAMES = (
    *("llama", "llama_tied", "llama_masked", "qwen2", "mistral", "olmo2", "gemma2"),
    *("gpt2", "opt", "gpt_neox", "bert", "vit", "transformer_encoder"),
)
AS_WRITTEN_BY_HAND = ("llama", "llama_tied", "qwen2", "mistral", "olmo2", "gemma2", "gpt2", "opt")


def suggested(module: nn.Module) -> dict[str, Any]:
    """The rules of the text, executed."""
    rules: dict[str, Any] = eval(suggest_sharding(module), {"ShardingSpec": dict, "Shard": Shard})
    return rules


def _wide(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    return tuple(value.double() for value in batch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_the_suggestion_computes_what_one_process_computes(name: str) -> None:
    family = FAMILIES[name]
    module, batch = family.build().double(), _wide(family.batch(*family.sizes[0]))
    made = divided(capture(module, batch, loss=family.loss), suggested(module), 2)
    assert made.gathers == ()
    found, expected = run_ranks(made, batch).result, eager(module, batch, family.loss)
    assert loss_difference(found, expected) < TOLERANCE
    assert max(gradient_differences(found, expected).values()) < TOLERANCE


@pytest.mark.parametrize("name", AS_WRITTEN_BY_HAND)
def test_the_suggestion_is_what_a_person_would_write(name: str) -> None:
    """The specs of test_program_partition_families, which compares them with one process."""
    module = FAMILIES[name].build()
    shapes = {parameter: tuple(value.shape) for parameter, value in module.named_parameters()}
    assert ShardingSpec(suggested(module)).resolve(shapes) == ShardingSpec(SPECS[name]).resolve(shapes)
