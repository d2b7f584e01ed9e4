"""Tensor and context parallelism together, with pipeline stages: every gradient against the eager module."""

from __future__ import annotations

import pytest
from context_harness import Ranks, differences
from partition_harness import dims_of
from partition_specs import SPECS
from program_families import FAMILIES

from distensor.program import capture, partition


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention", "stages"),
    [
        ("llama_tied", "ring", 2),
        ("gpt2", "all_gather", 1),
        ("qwen2", "ulysses", 2),
    ],
)
def test_two_by_two_ranks(name: str, attention: str, stages: int) -> None:
    family = FAMILIES[name]
    module = family.build()
    captured = capture(module, family.batch(*family.sizes[0]), loss=family.loss)
    made = partition(captured, dims_of(captured, SPECS[name]), tensor=2, context=2, attention=attention)
    assert (made.gathers, made.whole_sequences) == ((), ())
    ranks = Ranks(module, made, family.stages(stages) if stages > 1 else None)
    loss, gradient = differences(ranks, family.batch(*family.sizes[1]), family.loss)
    assert loss < 1e-6
    assert gradient < 1e-5
