"""bf16 is torch.autocast("cpu", dtype=torch.bfloat16) of the eager module: lists, casts, losses, gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from partition_harness import divided, run_ranks
from program_families import FAMILIES, squared_error
from program_harness import cut_module, eager, loss_difference, run_cut, runners_of, whole_difference
from torch import Tensor, nn
from torch.nn import functional

from distensor.core.compute import Precision
from distensor.core.errors import CaptureError
from distensor.nn import DistributedModel, Shard, StageMapping
from distensor.program import Captured, StageProgram, capture, cut
from distensor.program.calls import DTYPES
from distensor.program.precision import (
    COMPOSED,
    LOWERED,
    RAISED,
    WIDENED,
    is_eligible,
    operand_dtype,
)
from distensor.program.signatures import SIGNATURES
from distensor.program.values import DType, Ref, WeightRef

SAME_PATH = ("llama_masked", "gpt2", "bert", "vit", "transformer_encoder", "mlp", "conv")
"""Families whose eager forward takes the path that torch.export sees; Llama without a mask builds one when traced."""


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@cache
def captured_bf16(name: str) -> tuple[nn.Module, Captured]:
    family = FAMILIES[name]
    module = family.build()
    example = family.batch(*family.sizes[0])
    return module, capture(module, example, loss=family.loss, precision=Precision.BF16)


def test_the_lists_are_those_of_the_running_torch() -> None:
    def listed(op: str) -> bool:
        space, base, overload = op.split(".")
        name = f"{space}::{base}" + ("" if overload == "default" else f".{overload}")
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU"))

    assert {op for op in SIGNATURES if op.startswith("aten.") and listed(op)} == LOWERED | RAISED | WIDENED


def _real(*shape: int) -> Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).reshape(shape)


_TARGET = torch.tensor([1, 0, 2])
_PAIR = (_real(3, 4), _real(3, 4) * 0.7)
CALLS: Mapping[str, tuple[Any, ...]] = {
    "aten.linear.default": (_real(3, 4), _real(2, 4), _real(2)),
    "aten.matmul.default": (_real(2, 3, 4), _real(4, 2)),
    "aten.mm.default": (_real(3, 4), _real(4, 2)),
    "aten.bmm.default": (_real(2, 3, 4), _real(2, 4, 2)),
    "aten.addmm.default": (_real(3, 2), _real(3, 4), _real(4, 2)),
    "aten.baddbmm.default": (_real(2, 3, 2), _real(2, 3, 4), _real(2, 4, 2)),
    "aten.conv1d.default": (_real(1, 2, 6), _real(3, 2, 3)),
    "aten.conv1d.padding": (_real(1, 2, 6), _real(3, 2, 3), None, [1], "same"),
    "aten.conv2d.default": (_real(1, 2, 6, 6), _real(3, 2, 3, 3), _real(3)),
    "aten.conv2d.padding": (_real(1, 2, 6, 6), _real(3, 2, 3, 3), None, [1, 1], "same"),
    "aten.conv3d.default": (_real(1, 2, 4, 4, 4), _real(3, 2, 3, 3, 3)),
    "aten.conv_transpose1d.default": (_real(1, 2, 6), _real(2, 3, 3)),
    "aten.conv_transpose2d.input": (_real(1, 2, 4, 4), _real(2, 3, 3, 3)),
    "aten.prelu.default": (_real(3, 4) - 0.5, _real(4)),
    "aten.scaled_dot_product_attention.default": (_real(1, 2, 3, 4), _real(1, 2, 3, 4), _real(1, 2, 3, 4)),
    "aten.prod.default": (_real(4).bfloat16(),),
    "aten.prod.dim_int": (_real(3, 4).bfloat16(), 1),
    "aten.polar.default": (_real(4), _real(4).bfloat16().float()),
    "aten.view_as_complex.default": (_real(3, 2).bfloat16(),),
    "aten.cross_entropy_loss.default": (_real(3, 4).bfloat16(), _TARGET),
    "aten.nll_loss.default": (_real(3, 4).bfloat16(), _TARGET),
    "aten.nll_loss_nd.default": (_real(3, 4).bfloat16(), _TARGET),
    **{
        f"aten.{name}.default": (_PAIR[0].bfloat16(), _PAIR[1])
        for name in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
            "binary_cross_entropy_with_logits",
            "kl_div",
            "soft_margin_loss",
            "hinge_embedding_loss",
        )
    },
    "aten.cosine_embedding_loss.default": (_PAIR[0].bfloat16(), _PAIR[1], torch.tensor([1.0, -1.0, 1.0])),
    "aten.margin_ranking_loss.default": (_real(3).bfloat16(), _real(3) * 0.7, torch.tensor([1.0, -1.0, 1.0])),
    "aten.triplet_margin_loss.default": (_PAIR[0].bfloat16(), _PAIR[1], _real(3, 4) * 2),
    "aten.cat.default": ([_real(3, 4), _real(3, 4).bfloat16()],),
    "aten.stack.default": ([_real(3, 4).bfloat16(), _real(3, 4).bfloat16()],),
    "aten.softmax.int": (_real(3, 4).bfloat16(), -1),
    "aten.layer_norm.default": (_real(3, 4), [4]),
    "aten.add.Tensor": (_real(3, 4), _real(3, 4).bfloat16()),
    "aten.mul.Tensor": (_real(3, 4).bfloat16(), _real(3, 4).bfloat16()),
}


def test_every_listed_operation_has_an_example() -> None:
    assert CALLS.keys() >= LOWERED | RAISED | WIDENED | COMPOSED


@pytest.mark.parametrize("op", CALLS)
def test_an_operation_on_cast_operands_is_what_autocast_computes(op: str) -> None:
    _, base, overload = op.split(".")
    kernel, arguments = getattr(getattr(torch.ops.aten, base), overload), CALLS[op]
    with autocast():
        expected = kernel(*arguments)
    flat = [item for value in arguments for item in (value if isinstance(value, list) else [value])]
    dtypes = [DTYPES[item.dtype] for item in flat if isinstance(item, Tensor)]
    wanted = operand_dtype(op, dtypes)

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(item) for item in value]
        touched = wanted is not None and isinstance(value, Tensor) and is_eligible(DTYPES[value.dtype])
        return value.to(getattr(torch, wanted.value)) if touched and wanted is not None else value

    ours = kernel(*(cast(value) for value in arguments))
    assert ours.dtype == expected.dtype
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", SAME_PATH)
def test_loss_is_equal_to_the_bit_and_gradients_to_rounding_of_float32(name: str) -> None:
    family = FAMILIES[name]
    module, graph = captured_bf16(name)
    batch = family.batch(*family.sizes[1])
    reference = eager(module, batch, family.loss, autocast=True)
    for count in (1, 4):
        pieces = cut(graph, DistributedModel(module, stage_mapping=StageMapping(family.stages(count))).stages)
        ours = run_cut(pieces, runners_of(pieces), batch)
        assert ours.loss == reference.loss
        assert whole_difference(ours, reference) <= 1e-7


def test_where_eager_takes_another_path_the_difference_is_rounding_of_bfloat16() -> None:
    family = FAMILIES["llama"]
    module, graph = captured_bf16("llama")
    batch = family.batch(*family.sizes[0])
    reference = eager(module, batch, family.loss, autocast=True)
    pieces = cut(graph)
    ours = run_cut(pieces, runners_of(pieces), batch)
    assert loss_difference(ours, reference) <= 1e-4
    assert whole_difference(ours, reference) <= 2**-7
    single = eager(module, batch, family.loss)
    assert whole_difference(single, reference) > 1e-4, "bfloat16 is seen at all"


def test_parameters_stay_float32_and_each_is_cast_once_for_the_stage() -> None:
    module, graph = captured_bf16("gpt2")
    pieces = cut(graph, DistributedModel(module, stage_mapping=StageMapping(FAMILIES["gpt2"].stages(4))).stages)
    for program in pieces.programs:
        assert {spec.dtype for spec in program.parameters} == {DType.FLOAT32}
        cast = [
            node.args["self"] for node in program.nodes if node.op == "aten.to.dtype" and _is_weight(node.args["self"])
        ]
        assert cast
        assert len(set(cast)) == len(cast)
        used = {reference for node in program.nodes for reference in node.references()}
        assert all(Ref(spec.name) in used for spec in program.inputs_from("previous")), "no weight crosses a border"
    assert [group.stages for group in pieces.tied] == [(0, 3)]


def test_what_crosses_a_border_has_the_type_that_autocast_gives_it() -> None:
    module, graph = captured_bf16("mlp")
    pieces = cut(graph, DistributedModel(module, stage_mapping=StageMapping(FAMILIES["mlp"].stages(2))).stages)
    assert [spec.dtype for spec in pieces.programs[0].outputs] == [DType.BFLOAT16]
    assert StageProgram.from_json(pieces.programs[1].to_json()) == pieces.programs[1]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_twenty_steps_follow_the_eager_curve_to_the_bit(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    family = FAMILIES["mlp"]
    module, graph = captured_bf16("mlp")
    pieces = cut(graph, DistributedModel(module, stage_mapping=StageMapping(family.stages(2))).stages)
    runners = runners_of(pieces)
    reference = family.build()
    ours = optimizer([p for runner in runners for p in runner.parameters.values()], lr=0.05)
    theirs = optimizer(reference.parameters(), lr=0.05)
    for step in range(20):
        batch = family.batch(4 + step % 3, 1)
        ours_loss = run_cut(pieces, runners, batch).loss
        ours.step()
        expected = eager(reference, batch, family.loss, autocast=True)
        theirs.step()
        assert ours_loss == expected.loss


class Switching(nn.Module):
    """Switches autocast itself, and asks values for their type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            scores = (hidden.float() @ hidden.float().T).softmax(-1)
        with torch.autocast("cuda", enabled=False):
            mixed = scores @ hidden.to(scores.dtype)
        with autocast():
            return self.second(mixed.to(hidden.dtype)).float() + mixed @ self.second.weight


def _pairs(rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator)


@pytest.mark.parametrize("precision", list(Precision))
def test_regions_that_switch_autocast_are_followed(precision: Precision) -> None:
    torch.manual_seed(0)
    module = Switching().train()
    pieces = cut_module(module, _pairs(), None, loss=squared_error, precision=precision)
    reference = eager(module, _pairs(), squared_error, autocast=precision is Precision.BF16)
    ours = run_cut(pieces, runners_of(pieces), _pairs())
    assert ours.loss == reference.loss
    assert whole_difference(ours, reference) <= 1e-7


def _mixed_up(outputs: Tensor, _: Any) -> Tensor:
    with autocast():
        low = outputs @ outputs.T
    return functional.linear(low, torch.ones(1, low.shape[0])).mean()


def test_what_eager_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"aten\.linear\.default.*mixes torch\.bfloat16, torch\.float32"):
        capture(nn.Linear(4, 4).train(), _pairs(), loss=_mixed_up)


def test_a_module_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"'weight' is on meta.*module\.to\('cpu'\)"):
        capture(nn.Linear(4, 4, device="meta").train(), _pairs(), loss=squared_error, precision=Precision.BF16)


def test_a_loss_of_bfloat16_becomes_float32() -> None:
    module = nn.Linear(4, 4).train()
    graph = capture(module, _pairs(), loss=lambda out, _: out.square().mean(), precision=Precision.BF16)
    assert graph.values[graph.loss].dtype is DType.FLOAT32
    assert graph.values[graph.weight].dtype is DType.INT64


def test_master_weights_take_updates_that_bfloat16_loses() -> None:
    """Case DTY-03: a weight of 1, a hundred updates of 0.001."""
    module = nn.Linear(1, 1, bias=False).train()
    nn.init.ones_(module.weight)
    pieces = cut_module(
        module, (torch.ones(2, 1), torch.ones(2, 1)), None, loss=lambda out, _: out.mean(), precision=Precision.BF16
    )
    (runner,) = runners_of(pieces)
    optimizer = torch.optim.SGD(runner.parameters.values(), lr=1e-3)
    for _ in range(100):
        run_cut(pieces, [runner], (torch.ones(2, 1), torch.ones(2, 1)))
        optimizer.step()
    assert float(runner.parameters["weight"].detach()) == pytest.approx(0.9, abs=1e-4)
    lost = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        lost -= 1e-3
    assert float(lost) == 1.0


class Kinds(nn.Module):
    """A first half that gives values of every kind, a second one that uses them all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        kinds = (made.argmax(-1), made > 0, torch.complex(made, made), made.bfloat16(), made.mean(), made[:, :0])
        ids, mask, turned, low, scalar, empty = kinds
        hidden = self.second(torch.where(mask, low.float(), torch.view_as_real(turned)[..., 1] * scalar))
        return hidden + ids.unsqueeze(-1) + torch.cat([empty, made], 1)  # type: ignore[no-any-return]


def test_values_of_every_kind_cross_a_border() -> None:
    """Case DTY-05: integers, booleans, complex numbers, bfloat16, no dims and no elements."""
    torch.manual_seed(0)
    module = Kinds().train()
    stages = [["first"], ["second"]]
    graph = capture(module, _pairs(), loss=squared_error)
    homes = DistributedModel(module, stage_mapping=StageMapping(stages)).stages
    pieces = cut(graph, homes)
    ours = run_cut(pieces, runners_of(pieces), _pairs(5))
    reference = eager(module, _pairs(5), squared_error)
    assert ours.loss == reference.loss
    assert whole_difference(ours, reference) <= 1e-7


def _is_weight(value: Any) -> bool:
    return isinstance(value, WeightRef)


def test_functional_uses_of_a_weight_are_in_the_stage_of_the_weight() -> None:
    """A cast weight says no more than the weight itself where its module says nothing."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.eye(4))
            self.second = nn.Parameter(torch.eye(4) * 2)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(functional.linear(x, self.first), self.second)

    module = Functional().train()
    pieces = cut_module(module, _pairs(), [["first"], ["second"]], loss=squared_error, precision=Precision.BF16)
    assert [[spec.name for spec in program.parameters] for program in pieces.programs] == [["first"], ["second"]]
    assert pieces.tied == ()


class Wide(nn.Module):
    """Three products of one value, each with a cast of its own, behind a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.o = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x)).float()  # type: ignore[no-any-return]


def test_casts_of_one_value_need_one_sum_of_gradients() -> None:
    torch.manual_seed(0)
    module = Wide().train()
    graph = capture(module, _pairs(), loss=squared_error, precision=Precision.BF16)
    columns = {f"{name}.{kind}": Shard(dim=0) for name in "qkv" for kind in ("weight", "bias")}
    made = divided(graph, {**columns, "o.weight": Shard(dim=1)}, 2)
    for rank in range(2):
        ops = [node.op for node in made.captured(tp=rank).nodes]
        assert ops.count("dist.enter.default") == 1
        assert ops.count("dist.reduce.default") == 1
    reference = eager(module, _pairs(), squared_error, autocast=True)
    assert whole_difference(run_ranks(made, _pairs()).result, reference) <= 2**-7
