"""Operations on single elements, with broadcasting: cut operands stay cut, all others follow."""

from __future__ import annotations

from collections.abc import Mapping

from distensor.program.ops import OPERATIONS
from distensor.program.partitioning.rewriter import Rewriter
from distensor.program.partitioning.rules.base import Rule, broadcast, lead, over, tensors
from distensor.program.values import Ref

_SECTIONS = ("# elementwise, one tensor", "# elementwise, two tensors")
_OTHERS = frozenset({"aten.prelu.default", "aten.glu.default"})
_FURTHER = (
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.alias.default",
    "aten.to.dtype",
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.full_like.default",
    "aten.dropout.default",
    "aten.rand_like.default",
    "aten.randn_like.default",
    "aten.complex.default",
    "aten.polar.default",
)


def _names() -> list[str]:
    """The operations of the table's elementwise sections, and some of others."""
    found: list[str] = []
    section = ""
    for line in OPERATIONS.splitlines():
        if line.startswith("#"):
            section = line
        elif section in _SECTIONS:
            found.append(line.partition("(")[0])
    return [name for name in (*found, *_FURTHER) if name not in _OTHERS]


def elementwise(rewriter: Rewriter) -> None:
    """Any number of operands that are broadcast to one shape."""
    shape = rewriter.shape(Ref(next(name for name in rewriter.node.out if name is not None)))
    result = lead(rewriter, tensors(tuple(rewriter.node.args.values())), shape)
    if result is None:
        rewriter.passed_on()
        return
    args = {
        key: over(value, lambda name: broadcast(rewriter, name, shape, result))
        for key, value in rewriter.node.args.items()
    }
    rewriter.keep(args, result)


def typed_like(rewriter: Rewriter) -> None:
    """type_as: of the second tensor only the dtype counts."""
    value, info = rewriter.argument("self"), rewriter.info[rewriter.out()]
    rewriter.emit(
        "aten.to.dtype",
        {"self": value, "dtype": info.dtype.value},
        info,
        rewriter.shard(value),
        name=rewriter.out().name,
    )


def feature_dropout(rewriter: Rewriter) -> None:
    """Whole channels: cut along rows or channels, each rank draws its own masks."""
    value = rewriter.argument("input")
    shard = rewriter.shard(value)
    assert shard is not None
    if shard.dim < 2:
        rewriter.keep(rewriter.node.args, shard)
    else:
        rewriter.passed_on()


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_names(), elementwise),
    "aten.broadcast_tensors.default": elementwise,
    "aten.type_as.default": typed_like,
    "aten.feature_dropout.default": feature_dropout,
}
