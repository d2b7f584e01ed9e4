"""One graph -> the graph of each rank of the context-parallel axis.

Batch tensors stay whole: every rank gets them all (they are small), and so do positions, masks and labels, which are
computed from them as in one process and cut only where they meet something that is cut. So labels are shifted before
the split. The sequence is cut where a parameter first meets a tensor that has it: the embedding of the ids, as a rule.
Operations without a rule get their sequence made whole again, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distensor.core.compute import ContextAttention
from distensor.core.errors import CaptureError
from distensor.core.parallel import Axis
from distensor.core.sequence import HeadTail
from distensor.program.capturing import Captured, live_nodes
from distensor.program.context.attending import ATTENDING
from distensor.program.context.extents import Probes
from distensor.program.context.glue import remade
from distensor.program.context.layout import Layout, Same, Split
from distensor.program.context.pointwise import POINTWISE, Rule
from distensor.program.context.products import PRODUCTS
from distensor.program.context.reducing import REDUCING
from distensor.program.context.rewriter import Name, Rewriter
from distensor.program.context.sequences import one_sequence
from distensor.program.context.shaping import SHAPING
from distensor.program.expressions import Size
from distensor.program.values import Argument, AxisSpec, Dim, Node, Ref, WeightRef

RULES: Mapping[str, Rule] = {**POINTWISE, **SHAPING, **PRODUCTS, **REDUCING, **ATTENDING}


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCut:
    """The graphs of all ranks; together they compute what the one they are made from computes."""

    graphs: tuple[Captured, ...]
    gathers: tuple[tuple[str, str], ...]
    """(operation, module) where the sequence is made whole, for want of a rule."""


def cut_sequence(
    captured: Captured, division: HeadTail, method: ContextAttention = ContextAttention.ALL_GATHER
) -> ContextCut:
    """Rewrite `captured` for the ranks of `division`; keys and values move by `method`.

    Every rank's graph takes the whole batch. Sizes of shards follow from the length of each batch.

    Raises:
        BatchError: no tensor of the batch has a sequence, or several have different ones.
        CaptureError: nothing in the module can be cut along the sequence.
        ConfigError: the method does not fit the module (fewer heads than ranks).
    """
    captured, sequence = one_sequence(captured)
    made = [_rewrite(captured, sequence, division, method, rank) for rank in range(division.ranks)]
    return ContextCut(graphs=tuple(graph for graph, _ in made), gathers=made[0][1])


def _rewrite(
    captured: Captured, sequence: str, division: HeadTail, method: ContextAttention, rank: int
) -> tuple[Captured, tuple[tuple[str, str], ...]]:
    layout = Layout.of(division, Size(sequence))
    rewriter = Rewriter(
        captured=captured,
        rank=rank,
        layout=layout,
        method=method.value,
        probes=Probes.of(captured.dims),
        remade=remade,
    )
    for spec in captured.inputs:
        rewriter.know(spec.name, captured.values[spec.name], Same.WHOLE)
    for node in captured.nodes:
        _rewrite_node(rewriter, node)
    loss, weight = (_result(rewriter, name) for name in (captured.loss, captured.weight))
    if not any(isinstance(rewriter.states[name], Split) for node in rewriter.nodes for name in node.out if name):
        raise CaptureError(
            f"context_parallel={division.ranks}: nothing in the module can be cut along the sequence (dim 1 of "
            f"{', '.join(repr(spec.name) for spec in captured.inputs)}); use context_parallel=1"
        )
    dims = tuple(_at_least(dim, division.shortest) if dim.name == sequence else dim for dim in captured.dims)
    made = replace(
        captured,
        dims=dims,
        nodes=live_nodes(rewriter.nodes, {loss, weight}),
        values=rewriter.values,
        loss=loss,
        weight=weight,
        axes=(*captured.axes, AxisSpec(name=Axis.CP.value, size=division.ranks, rank=rank)),
    )
    return made, tuple(rewriter.gathers)


def _at_least(dim: Dim, length: int) -> Dim:
    """Each rank holds one position at least."""
    return replace(dim, minimum=max(dim.minimum, length))


def _result(rewriter: Rewriter, name: str) -> str:
    """Loss and weight are the same on all ranks, and the loss has its full gradient on each."""
    rewriter.module = ""
    found = rewriter.whole(Ref(name))
    assert isinstance(found, Ref)
    return found.name


def _rewrite_node(rewriter: Rewriter, node: Node) -> None:
    rewriter.module = node.module
    rule = RULES.get(node.op)
    if any(rewriter.split_of(item) is not None for item in node.references()):
        if rule is None or not rule(rewriter, node):
            _gathered(rewriter, node)
        return
    begun = _begun(rewriter, node) if rule is not None else None
    if begun is None or rule is None or not rule(rewriter, begun):
        _shared(rewriter, node)


def _gathered(rewriter: Rewriter, node: Node) -> None:
    """Every rank runs it on the whole sequence."""
    rewriter.gathers.append((node.op, node.module))
    args = {key: _mapped(value, rewriter.whole) for key, value in node.args.items()}
    rewriter.add(node, args, [Same.WHOLE] * len(node.out))


def _mapped(value: Argument, change: Callable[[Name], Name]) -> Argument:
    """An argument with its references changed."""
    if isinstance(value, (Ref, WeightRef)):
        return change(value)
    return tuple(_mapped(item, change) for item in value) if isinstance(value, tuple) else value


def _shared(rewriter: Rewriter, node: Node) -> None:
    """Every rank runs it on the same values. Of parameters alone, gradients stay parts of a sum."""
    needing = [item for item in node.references() if rewriter.info(item).requires_grad]
    if all(rewriter.state(item) is Same.PARTIAL for item in needing):
        rewriter.add(node, node.args, [Same.PARTIAL if needing else Same.WHOLE] * len(node.out))
        return
    args = {key: _mapped(value, rewriter.whole) for key, value in node.args.items()}
    rewriter.add(node, args, [Same.WHOLE] * len(node.out))


def _begun(rewriter: Rewriter, node: Node) -> Node | None:
    """The node with a tensor cut that is computed from the batch, if it meets a parameter here."""
    items = list(node.references())
    if not any(rewriter.info(item).requires_grad and rewriter.state(item) is Same.PARTIAL for item in items):
        return None
    found = ((item, _sequence_in(rewriter, item)) for item in items)
    item, dim = next(((item, dim) for item, dim in found if dim is not None), (None, None))
    if item is None or dim is None:
        return None
    cut = {item: rewriter.cut(item, Split(dim, rewriter.layout))}
    args = {key: _mapped(value, lambda name: cut.get(name, name)) for key, value in node.args.items()}
    return replace(node, args=args)


def _sequence_in(rewriter: Rewriter, item: Name) -> int | None:
    """The dim of a tensor without gradient that is the sequence, if one alone is."""
    info = rewriter.info(item)
    if isinstance(item, WeightRef) or info.requires_grad:
        return None
    found = [dim for dim, extent in enumerate(info.shape) if rewriter.probes.same(extent, rewriter.layout.length)]
    return found[0] if len(found) == 1 else None
