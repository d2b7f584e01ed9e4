"""Context parallelism: graphs cut along the sequence give the loss and every gradient of the eager module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from context_harness import Ranks, differences
from context_models import MODELS, RANDOM, Model, batch, built
from partition_specs import SPECS
from program_families import FAMILIES
from program_harness import Result, eager, gradient_differences, run_cut, whole_difference
from torch import Tensor, nn

from distensor.core import sequence
from distensor.core.compute import Precision
from distensor.core.errors import BatchError, CaptureError, ConfigError
from distensor.nn import Shard, ShardingSpec
from distensor.program import Captured, Limits, StageRunner, attention, capture, check_shapes, cut
from distensor.program.collectives import Pieces
from distensor.program.expressions import Size, evaluate
from distensor.program.partitioning import partition

QUICK = "llama_tied gpt2 bert transformer_encoder"
SLOW = "llama llama_masked qwen2 mistral mixtral gemma2 olmo2 opt gpt_neox"
NAMES = [*QUICK.split(), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW.split())]


def dims_of(graph: Captured, spec: Mapping[str, Any]) -> dict[str, int | None]:
    """The declaration that users write, resolved."""
    resolved = ShardingSpec(spec).resolve({name: spec.shape for name, spec in graph.parameters.items()})
    return {name: rule.dim if isinstance(rule, Shard) else None for name, rule in resolved.items()}


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str, captured: Callable[[str], tuple[Any, Captured]]) -> None:
    """Two batches of other lengths (12 and 19) through the same programs."""
    module, graph = captured(name)
    made = partition(graph, {}, context=2 + len(name) % 2)
    ranks = Ranks(module, made)
    family = FAMILIES[name]
    assert made.whole_sequences == ()
    for rows, length in family.sizes:
        loss, gradients = differences(ranks, family.batch(rows, length), family.loss)
        assert loss <= 1e-6
        assert gradients <= (5e-6 if name == "olmo2" else 2e-6)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama_masked", "ulysses"),
        ("mistral", "ring"),
        pytest.param("llama_masked", "ring", marks=pytest.mark.slow),
        pytest.param("gpt2", "ulysses", marks=pytest.mark.slow),
        pytest.param("bert", "ring", marks=pytest.mark.slow),
    ],
)
def test_families_by_each_method(name: str, method: str, captured: Callable[[str], tuple[Any, Captured]]) -> None:
    """At four ranks, two micro-batches and two stages; lengths that eight does not divide, and the shortest."""
    module, graph = captured(name)
    family = FAMILIES[name]
    ranks = Ranks(module, partition(graph, {}, context=4, attention=method), family.stages(2), parts=2)
    for length in (9 if name == "mistral" else 6, 13):
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


@pytest.mark.parametrize(
    ("name", "tensor", "context", "method"),
    [
        ("llama_tied", 2, 2, "all_gather"),
        ("gpt2", 2, 3, "ring"),
        pytest.param("qwen2", 3, 2, "ulysses", marks=pytest.mark.slow),
        pytest.param("gemma2", 2, 2, "ring", marks=pytest.mark.slow),
        pytest.param("bert", 2, 3, "ulysses", marks=pytest.mark.slow),
    ],
)
def test_together_with_cut_weights(
    name: str, tensor: int, context: int, method: str, captured: Callable[[str], tuple[Any, Captured]]
) -> None:
    """Ulysses has one or two of the heads that tensor parallelism leaves to a rank; two pipeline stages."""
    module, graph = captured(name)
    family = FAMILIES[name]
    made = partition(graph, dims_of(graph, SPECS[name]), tensor=tensor, context=context, attention=method)
    assert made.whole_sequences == ()
    loss, gradients = differences(Ranks(module, made, family.stages(2)), family.batch(3, 13), family.loss)
    assert loss <= 1e-6
    assert gradients <= 2e-6


def _worst() -> float:
    module = built(MODELS["heads"])
    made = partition(capture(module, batch(2, 7)), {}, context=2)
    return max(differences(Ranks(module, made), batch(2, 13), None))


@pytest.mark.parametrize("mistake", ["the diagonal", "the order of chunks", "a gradient counted twice", "contiguous"])
def test_a_mistake_would_be_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests rest on: a wrong mask, wrong positions or a sum too many change the numbers."""
    assert _worst() <= 2e-6
    if mistake == "the diagonal":
        tiles = sequence._causal
        monkeypatch.setattr(
            sequence, "_causal", lambda tile: (dataclasses.replace(part, is_cut=False) for part in tiles(tile))
        )
    elif mistake == "the order of chunks":
        monkeypatch.setattr(Pieces, "ordered", lambda self, joined, dim: joined)
    elif mistake == "a gradient counted twice":
        scatter = Pieces.scatter
        monkeypatch.setattr(Pieces, "scatter", lambda self, group, full: 2 * scatter(self, group, full))
    else:
        monkeypatch.setattr(attention.Problem, "chunks", _contiguous)
    assert _worst() > 1e-2


def _contiguous(problem: Any, rank: int) -> tuple[tuple[int, int], ...]:
    sizes = problem.pieces.sizes()
    return ((sum(sizes[:rank]), sum(sizes[: rank + 1])),)


def test_bf16_is_as_near_to_fp32_as_one_process() -> None:
    """Attention, sums over ranks and the loss are made in 32 bits: cutting adds no rounding of its own to speak of."""
    module, batch_ = built(MODELS["heads"]), batch(4, 24)
    exact = eager(module, batch_, None)
    graph = capture(module, batch(2, 7), precision=Precision.BF16)
    alone = _distance(Ranks(module, partition(graph, {})).whole(batch_), exact)
    for context, method in ((2, "all_gather"), (3, "ring"), (2, "ulysses")):
        made = partition(graph, {}, context=context, attention=method)
        assert _distance(Ranks(module, made).whole(batch_), exact) <= 1.1 * alone
    assert alone > 1e-4


def _distance(ours: Result, exact: Result) -> float:
    return whole_difference(ours, exact)


def test_the_sequence_is_really_cut() -> None:
    """Rank 0 of two holds half of every hidden value, and one program serves every length."""
    graph = capture(built(MODELS["heads"]), batch(2, 8))
    made = partition(graph, {}, context=2)
    local, full = made.captured(cp=0).values, graph.values
    dims = {"batch": 2, "sequence": 8}
    halves = {
        name: [evaluate(extent, dims) for extent in local[name].shape]
        for name, info in full.items()
        if name in local and info.requires_grad and Size("sequence") in info.shape
    }
    assert len(halves) >= 6
    assert all(4 in shape and 8 not in shape[:2] for shape in halves.values())


@pytest.mark.parametrize("name", ["llama_tied", "bert"])
def test_a_rank_holds_its_share_of_activations(name: str, captured: Callable[[str], tuple[Any, Captured]]) -> None:
    """Bytes that a forward pass allocates at 64 positions: masks are made for the rank's rows alone."""
    _, graph = captured(name)
    made = partition(graph, {}, context=4)
    whole, share = (_activation_bytes(each) for each in (graph, made.captured(cp=1)))
    print(f"{name}: {whole} bytes in one process, {share} on each of four ranks")
    assert share <= 1.08 * whole / 4


def _activation_bytes(graph: Captured) -> int:
    (program,) = cut(graph).programs
    sizes = {dim.name: 2 if dim.name == "batch" else 64 for dim in program.dims}
    return check_shapes(program, Limits(), sizes).activation_bytes


def test_two_sequences_are_refused_with_their_shapes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return (self.embed(target) + self.embed(source).mean(1, keepdim=True)).square().mean()

    batch_ = {"source": torch.ones(2, 6, dtype=torch.int64), "target": torch.ones(2, 4, dtype=torch.int64)}
    graph = capture(Two(), batch_)
    with pytest.raises(BatchError, match=r"several lengths in source \[batch, sequence\], target \[batch, target_1\]"):
        partition(graph, {}, context=2)


def test_what_is_not_computed_along_the_sequence_is_refused() -> None:
    class Reversed(nn.Module):
        """The sequence is mixed away before a parameter is used."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, values: Tensor) -> Tensor:
            return (values.square().mean(1) * self.scale).square().mean()

    graph = capture(Reversed(), {"values": torch.ones(2, 6)})
    with pytest.raises(CaptureError, match="nothing in the module can be cut along the sequence"):
        partition(graph, {}, context=2)


def test_an_unknown_method_is_named() -> None:
    graph = capture(built(MODELS["plain"]), batch(2, 7))
    with pytest.raises(ConfigError, match="context_attention='flash': expected 'all_gather' or 'ring' or 'ulysses'"):
        partition(graph, {}, context=2, attention="flash")
