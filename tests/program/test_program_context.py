"""Context parallelism: graphs cut along the sequence give the loss and every gradient of the eager module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from context_harness import Ranks, differences
from context_models import MODELS, RANDOM, Model, batch, built
from program_families import FAMILIES
from program_harness import gradient_differences, run_cut

from distensor.program import Captured, StageRunner, capture, cut
from distensor.program.partitioning import partition

QUICK = "llama_tied mistral gemma2 gpt2 bert transformer_encoder"
SLOW = "llama llama_masked qwen2 olmo2 opt gpt_neox"
NAMES = [*QUICK.split(), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW.split())]


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str, captured: Callable[[str], tuple[Any, Captured]]) -> None:
    """Two batches of other lengths (12 and 19) through the same programs."""
    module, graph = captured(name)
    made = partition(graph, {}, context=2 + len(name) % 2)
    ranks = Ranks(module, made)
    family = FAMILIES[name]
    assert set(made.whole_sequences) <= {("aten.broadcast_tensors.default", "")}
    for rows, length in family.sizes:
        loss, gradients = differences(ranks, family.batch(rows, length), family.loss)
        assert loss <= 1e-6
        assert gradients <= (5e-6 if name == "olmo2" else 2e-6)


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama_masked", "ring"), ("llama_masked", "ulysses"), ("mistral", "ring"), ("gpt2", "ulysses"), ("bert", "ring")],
)
def test_families_by_each_method(name: str, method: str, captured: Callable[[str], tuple[Any, Captured]]) -> None:
    """At four ranks, two micro-batches and two stages; lengths that eight does not divide, and as many as ranks."""
    module, graph = captured(name)
    family = FAMILIES[name]
    ranks = Ranks(module, partition(graph, {}, context=4, attention=method), family.stages(2), parts=2)
    for length in (9 if name == "mistral" else 4, 13):
        loss, gradients = differences(ranks, family.batch(3, length), family.loss)
        assert loss <= 1e-6
        assert gradients <= 2e-6


@pytest.mark.parametrize("name", MODELS)
def test_operations(name: str) -> None:
    model = MODELS[name]
    module, made = _partitioned(model)
    assert {op.split(".")[1] for op, _ in made.whole_sequences} == set(model.wholes)
    ranks = Ranks(module, made)
    for sizes in ((2, 9), (3, 12)):
        loss, gradients = differences(ranks, batch(*sizes), None)
        assert loss <= 1e-6
        assert gradients <= 2e-6


def _partitioned(model: Model) -> tuple[Any, Any]:
    module = built(model)
    graph = capture(module, batch(2, 7), loss_weight=model.loss_weight)
    return module, partition(graph, {}, context=3)


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_is_that_of_one_process(name: str) -> None:
    """The masks are the same numbers, whatever the number of ranks."""
    module, made = _partitioned(RANDOM[name])
    graph = capture(module, batch(2, 7))
    pieces = cut(graph)
    runner = StageRunner(pieces.programs[0], pieces.weights(0))
    alone = run_cut(pieces, [runner], batch(2, 9), seed=3)
    ours = Ranks(module, made).whole(batch(2, 9), seed=3)
    assert ours.loss == pytest.approx(alone.loss, rel=1e-6)
    assert max(gradient_differences(ours, alone).values()) <= 2e-6
    assert alone.loss != run_cut(pieces, [runner], batch(2, 9), seed=4).loss
