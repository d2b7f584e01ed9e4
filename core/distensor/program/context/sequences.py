"""Which size of a batch is the length of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distensor.core.errors import BatchError
from distensor.program.builder import Info
from distensor.program.capturing import Captured
from distensor.program.expressions import Extent, Size, show, substitute
from distensor.program.values import Argument, Dim, Node, ValueSpec

_BATCH = "batch"


def one_sequence(captured: Captured) -> tuple[Captured, str]:
    """The graph with one name for the length of the sequence, and that name.

    The sequence is dim 1 of the batch's tensors. Capture names sizes apart unless the module needs them equal (labels
    of a shifted loss, say); those that were equal in the example are one from here on, which is checked on every batch.

    Raises:
        BatchError: no tensor has a dim 1 that may vary, or several have different ones.
    """
    lengths = _lengths(captured)
    if len(set(lengths.values())) != 1:
        raise BatchError(_explain(captured.inputs, bool(lengths)))
    name, length = next(iter(lengths.items()))
    renamed = {dim.name: name for dim in captured.dims if dim.example == length and dim.name not in (name, _BATCH)}
    return (_renamed(captured, renamed, name) if renamed else captured), name


def _lengths(captured: Captured) -> dict[str, int]:
    """Dims that are dim 1 of a tensor, with what they were in the example."""
    examples = {dim.name: dim.example for dim in captured.dims}
    second = (spec.shape[1] for spec in captured.inputs if len(spec.shape) > 1)
    trees = [extent.tree for extent in second if isinstance(extent, Size)]
    return {tree: examples[tree] for tree in trees if isinstance(tree, str)}


def _explain(inputs: Sequence[ValueSpec], several: bool) -> str:
    shapes = ", ".join(f"{spec.name} [{', '.join(map(show, spec.shape))}]" for spec in inputs)
    problem = "several lengths" if several else "no length that may vary"
    return (
        "context_parallel cuts dim 1 of the batch's tensors, which must be one sequence with a length that may vary; "
        f"there is {problem} in {shapes}"
    )


def _renamed(captured: Captured, renamed: Mapping[str, str], name: str) -> Captured:
    def shape(extents: Sequence[Extent]) -> tuple[Extent, ...]:
        return tuple(substitute(extent, renamed) for extent in extents)

    return replace(
        captured,
        dims=_merged(captured.dims, renamed, name),
        inputs=tuple(replace(spec, shape=shape(spec.shape)) for spec in captured.inputs),
        nodes=tuple(_node(node, renamed) for node in captured.nodes),
        values={
            key: Info(dtype=info.dtype, shape=shape(info.shape), requires_grad=info.requires_grad)
            for key, info in captured.values.items()
        },
    )


def _merged(dims: Sequence[Dim], renamed: Mapping[str, str], name: str) -> tuple[Dim, ...]:
    """The dims without the renamed ones, whose limits hold for `name`."""
    one = [dim for dim in dims if dim.name == name or dim.name in renamed]
    highs = [dim.maximum for dim in one if dim.maximum is not None]
    low, high = max(dim.minimum for dim in one), min(highs) if highs else None
    kept = (dim for dim in dims if dim.name not in renamed)
    return tuple(replace(dim, minimum=low, maximum=high) if dim.name == name else dim for dim in kept)


def _node(node: Node, renamed: Mapping[str, str]) -> Node:
    return replace(node, args={key: _argument(value, renamed) for key, value in node.args.items()})


def _argument(value: Argument, renamed: Mapping[str, str]) -> Argument:
    if isinstance(value, Size):
        return substitute(value, renamed)
    return tuple(_argument(item, renamed) for item in value) if isinstance(value, tuple) else value
