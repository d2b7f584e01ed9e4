"""What a forward pass takes, counted by running it on the meta device: sizes are known, nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from distensor.core.compute import Recompute
from distensor.program import StageRunner
from distensor.program.axes import meta_groups
from distensor.program.calls import TORCH_DTYPES, resolve
from distensor.program.expressions import evaluate
from distensor.program.shapes import computed_shapes

if TYPE_CHECKING:
    from distensor.program import StageProgram
    from distensor.program.values import InputSpec, WeightSpec

ATTENTION = "dist.attention.default"
META = torch.device("meta")
ROWS = "batch"
"""How capture names the dim of the rows."""
STEP_OVER_FORWARD = 3
"""The backward pass of a matrix product is two products of the same size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardCost:
    """Of one forward pass.

    `flops` are the floating-point operations of matrix products, convolutions and attention, a multiply-add counted
    as two. `kept_bytes` are what autograd, and recomputation for it, keep for the backward pass, weights not counted;
    kernels of a device may keep a little more or less than torch's general ones.
    """

    flops: int
    kept_bytes: int


def count(program: StageProgram, rows: int, recompute: Recompute = Recompute.NONE) -> ForwardCost:
    """What a forward pass over so many rows takes, other dims as captured."""
    dims = {dim.name: rows if dim.name == ROWS else dim.example for dim in program.dims}
    weights = {spec.name: _weight(spec) for spec in (*program.parameters, *program.buffers)}
    runner = StageRunner(program, weights, META, axes=meta_groups(program.axes), recompute=recompute)
    inputs = {spec.name: _input(spec, dims) for spec in program.inputs}
    kept = _Kept.beside([*runner.parameters.values(), *runner.buffers.values()])
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(kept.keep, _same),
        FlopCounterMode(display=False) as counter,
    ):
        runner.forward(inputs, seed=0)
    return ForwardCost(
        flops=counter.get_total_flops() + _attention_flops(program, dims),
        kept_bytes=kept.total + runner.kept_bytes,
    )


def _attention_flops(program: StageProgram, dims: Mapping[str, int]) -> int:
    """Of attention over the ranks of an axis, which torch does not know: this rank's queries with all keys."""
    nodes = [node for node in program.nodes if node.op == ATTENTION]
    shapes = computed_shapes(program, dims) if nodes else {}
    # Two products, of queries with keys and of their weights with values; each result has its value's width.
    return sum(4 * math.prod(shapes[str(node.out[0])]) * sum(resolve(node.args["lengths"], dims)) for node in nodes)


def _weight(spec: WeightSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=META)


def _input(spec: InputSpec, dims: Mapping[str, int]) -> Tensor:
    shape = [int(evaluate(extent, dims)) for extent in spec.shape]
    return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=META, requires_grad=spec.value.requires_grad)


@dataclass(slots=True)
class _Kept:
    """Memory blocks, each counted once. A block on the meta device has no address: its object tells it."""

    seen: set[int]
    total: int = 0
    alive: list[Tensor] = field(default_factory=list)
    """So that no object's address comes twice."""

    @classmethod
    def beside(cls, tensors: Collection[Tensor]) -> _Kept:
        return cls(seen={tensor.untyped_storage()._cdata for tensor in tensors})

    def keep(self, tensor: Tensor) -> Tensor:
        block = tensor.untyped_storage()
        if block._cdata not in self.seen:
            self.seen.add(block._cdata)
            self.alive.append(tensor)
            self.total += block.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
