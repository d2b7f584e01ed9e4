"""The pass of tensor parallelism over a captured graph: propagate, cut weights otherwise where needed, begin again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distensor.core.errors import ShardingError
from distensor.core.layouts import WeightLayout
from distensor.program.capturing import Captured, live_nodes
from distensor.program.partitioning.plans import Plans, RestartError
from distensor.program.partitioning.rewriter import TENSOR_AXIS, Gathered, Rewriter, local_info
from distensor.program.partitioning.rules import RULES
from distensor.program.values import AxisSpec, Ref, WeightSpec

_MOST_PASSES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCut:
    """The graph of every rank of tp, how weights are cut, and what is made whole for want of a rule."""

    graphs: tuple[Captured, ...]
    layouts: Mapping[str, WeightLayout]
    gathers: tuple[Gathered, ...]


def cut_weights(captured: Captured, placements: Mapping[str, int | None], size: int) -> TensorCut:
    """Rewrite `captured` for `size` ranks of tp; `placements` maps parameter names to the dim that is cut, or None.

    Raises:
        ShardingError: a parameter that cannot be cut for this many ranks, by name (SeveralProblemsError: several).
    """
    rewriter = _tensor_pass(captured, _dims(captured, placements), size)
    layouts = {name: plan.layout() for name, plan in rewriter.plans.of.items()}
    graphs = tuple(local_graph(rewriter, rank, layouts) for rank in range(size))
    return TensorCut(graphs=graphs, layouts=layouts, gathers=tuple(rewriter.gathers))


def _dims(captured: Captured, placements: Mapping[str, int | None]) -> dict[str, int]:
    """The cut dim of every parameter of the graph that has one, by its first name."""
    found: dict[str, int | None] = {}
    for name, dim in placements.items():
        known = captured.aliases.get(name, name)
        if known not in captured.parameters:
            continue  # nothing of the graph uses it
        ndim = len(captured.parameters[known].shape)
        place = None if dim is None else dim % ndim if ndim else dim
        if found.setdefault(known, place) != place:
            raise ShardingError(f"{name!r} is the same parameter as {known!r}: both must be cut alike")
        if place is not None and place >= ndim:
            raise ShardingError(f"{name!r} has {ndim} dims; there is no dim {dim} to cut")
    return {name: dim for name, dim in found.items() if dim is not None}


def _tensor_pass(captured: Captured, dims: Mapping[str, int], size: int) -> Rewriter:
    plans = Plans({name: tuple(spec.shape) for name, spec in captured.parameters.items()}, dims, size)
    for _ in range(_MOST_PASSES):
        rewriter = Rewriter(captured, plans)
        if rewrite(rewriter):
            plans.report()
            return rewriter
    raise ShardingError(f"the parameters cannot be cut for tensor_parallel={size}: {_MOST_PASSES} ways were tried")


def rewrite(rewriter: Rewriter) -> bool:
    """One pass over all nodes. False: some weights must be cut otherwise, as their plans now say; begin again.

    Such a pass goes on to the end with whole values, so that it finds what all layers need at once.
    """
    rewriter.plans.begin()
    for node in rewriter.captured.nodes:
        rewriter.node = node
        rule = RULES.get(node.op)
        if rule is None or not rewriter.is_cut():
            rewriter.passed_on()
            continue
        try:
            rule(rewriter)
        except RestartError:
            rewriter.passed_on()
    return not rewriter.plans.changed


def local_graph(rewriter: Rewriter, rank: int, layouts: Mapping[str, WeightLayout]) -> Captured:
    """The graph of one rank."""
    captured = rewriter.captured
    nodes = live_nodes([draft.node(rank) for draft in rewriter.drafts], {captured.loss, captured.weight})
    values = {
        name.name: local_info(info, rewriter.shards.get(name), rank)
        for name, info in rewriter.info.items()
        if isinstance(name, Ref)
    }
    return replace(
        captured,
        nodes=nodes,
        values=values,
        parameters={name: _local_spec(spec, layouts.get(name), rank) for name, spec in captured.parameters.items()},
        axes=(*captured.axes, AxisSpec(name=TENSOR_AXIS, size=rewriter.size, rank=rank)),
        layouts={**captured.layouts, **layouts},
    )


def _local_spec(spec: WeightSpec, layout: WeightLayout | None, rank: int) -> WeightSpec:
    return spec if layout is None else replace(spec, shape=layout.local_shape(rank))
