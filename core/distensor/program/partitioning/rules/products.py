"""Matrix products: columns stay cut, sums over a cut dim are completed, a bias is added once.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, for the pair of column and row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from distensor.program.builder import Name
from distensor.program.partitioning.layout import Layout, Shard
from distensor.program.partitioning.rewriter import Loose, Rewriter
from distensor.program.partitioning.rules.base import Rule, broadcast, following, is_one
from distensor.program.values import WeightRef

_SUM = "k"
"""The label of the dim that a product sums over."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor; `labels` name its dims, "" one that is broadcast."""

    key: str
    value: Name
    labels: tuple[str, ...]

    def dim(self, label: str) -> int | None:
        return self.labels.index(label) if label in self.labels else None


def _chosen(
    rewriter: Rewriter, operands: Sequence[Operand], summed: Collection[str] = (_SUM,)
) -> tuple[str, Layout] | None:
    """The label along which the product is cut: a weight's rather than that of an activation."""
    found: list[tuple[bool, str, Layout]] = []
    for operand in operands:
        shard = rewriter.shard(operand.value)
        if shard is not None and operand.labels[shard.dim]:
            found.append((isinstance(operand.value, WeightRef), operand.labels[shard.dim], shard.layout))
    if not found:
        return None
    _, label, layout = max(found, key=lambda item: item[0])
    whole_weight = any(isinstance(item.value, WeightRef) and rewriter.shard(item.value) is None for item in operands)
    if label in summed and whole_weight:
        return None  # gathering the activation is cheaper than gathering the gradient of the weight
    return label, layout


def _factors(rewriter: Rewriter, operands: Sequence[Operand], label: str, layout: Layout) -> dict[str, Loose]:
    factors: dict[str, Loose] = {}
    for operand in operands:
        dim = operand.dim(label)
        factors[operand.key] = (
            rewriter.outside(operand.value)
            if dim is None
            else rewriter.aligned(operand.value, Shard(dim=dim, layout=layout))
        )
    return factors


def product(
    rewriter: Rewriter, operands: Sequence[Operand], result: Sequence[str], *, op: str, addend: Loose, scale: Loose = 1
) -> None:
    """A product of `operands` plus `addend` (or None) times `scale`."""
    chosen = _chosen(rewriter, operands)
    if chosen is None:
        rewriter.passed_on()
        return
    label, layout = chosen
    layout = following(rewriter, (operand.value for operand in operands), layout)
    factors = _factors(rewriter, operands, label, layout)
    shape = rewriter.shape(rewriter.out())
    if label != _SUM:
        shard = Shard(dim=list(result).index(label), layout=layout)
        rest = {key: value for key, value in rewriter.node.args.items() if key not in factors}
        if addend is not None:
            key = "bias" if "bias" in rest else "self"
            rest[key] = broadcast(rewriter, addend, shape, shard)
        rewriter.keep({**factors, **rest}, shard)
        return
    _completed(rewriter, op, factors, addend, scale)


def _completed(rewriter: Rewriter, op: str, factors: Mapping[str, Loose], addend: Loose, scale: Loose) -> None:
    """Each rank's share of the sum, the sum over the ranks, and then what is added to it."""
    out = rewriter.out()
    partial = rewriter.one(op, factors, out)
    if rewriter.argument("alpha") not in (None, 1):
        partial = rewriter.one("aten.mul.Tensor", {"self": partial, "other": rewriter.argument("alpha")}, out)
    if addend is None or scale == 0:
        rewriter.reduced(partial, name=out.name)
        return
    total = rewriter.reduced(partial)
    args: dict[str, Loose] = {"self": total, "other": rewriter.whole(addend)}
    if scale != 1:
        args["alpha"] = scale
    rewriter.emit("aten.add.Tensor", args, rewriter.info[out], name=out.name)


def _rows(count: int) -> tuple[str, ...]:
    return tuple(f"row{index}" for index in range(count))


def linear(rewriter: Rewriter) -> None:
    value, weight = rewriter.argument("input"), rewriter.argument("weight")
    rows = _rows(len(rewriter.shape(value)) - 1)
    columns = ("n",) if len(rewriter.shape(weight)) == 2 else ()
    operands = (Operand("input", value, (*rows, _SUM)), Operand("weight", weight, (*columns, _SUM)))
    op = "aten.linear.default"
    product(rewriter, operands, (*rows, *columns), op=op, addend=rewriter.argument("bias"))


def _plain(keys: tuple[str, str], labels: tuple[tuple[str, ...], tuple[str, ...]]) -> Rule:
    def rule(rewriter: Rewriter) -> None:
        operands = [Operand(key, rewriter.argument(key), labels[index]) for index, key in enumerate(keys)]
        result = [label for label in dict.fromkeys((*labels[0], *labels[1])) if label != _SUM]
        product(rewriter, operands, result, op=rewriter.node.op, addend=None)

    return rule


def matmul(rewriter: Rewriter) -> None:
    """Any number of dims, batch dims broadcast."""
    left, right = rewriter.argument("self"), rewriter.argument("other")
    shapes = rewriter.shape(left), rewriter.shape(right)
    batch = max(len(shapes[0]), len(shapes[1]), 2) - 2
    ends = (("m", _SUM) if len(shapes[0]) > 1 else (_SUM,), (_SUM, "n") if len(shapes[1]) > 1 else (_SUM,))
    operands = []
    for key, value, shape, end in zip(("self", "other"), (left, right), shapes, ends, strict=True):
        own = len(shape) - len(end)
        labels = ["" if is_one(shape[at]) else f"batch{batch - own + at}" for at in range(own)]
        operands.append(Operand(key, value, (*labels, *end)))
    result = [f"batch{at}" for at in range(batch)]
    result += [label for label in ("m", "n") if label in (*ends[0], *ends[1])]
    product(rewriter, operands, result, op="aten.matmul.default", addend=None)


def _added(op: str, keys: tuple[str, str], batch: tuple[str, ...]) -> Rule:
    """addmm and baddbmm: beta * self + alpha * product."""

    def rule(rewriter: Rewriter) -> None:
        operands = (
            Operand(keys[0], rewriter.argument(keys[0]), (*batch, "m", _SUM)),
            Operand(keys[1], rewriter.argument(keys[1]), (*batch, _SUM, "n")),
        )
        if not any(rewriter.shard(operand.value) for operand in operands):
            rewriter.passed_on()
            return
        added = rewriter.argument("self")
        renamed = [Operand(key, item.value, item.labels) for key, item in zip(("self", "mat2"), operands, strict=True)]
        chosen = _chosen(rewriter, operands)
        if chosen is not None and chosen[0] == _SUM:
            operands = (renamed[0], renamed[1])
        product(rewriter, operands, (*batch, "m", "n"), op=op, addend=added, scale=rewriter.argument("beta"))

    return rule


def einsum(rewriter: Rewriter) -> None:
    """Each letter is a dim; diagonals get whole values."""
    left, _, result = rewriter.argument("equation").partition("->")
    terms, names = left.split(","), rewriter.argument("tensors")
    if any(len(set(term)) < len(term) for term in terms):
        rewriter.passed_on()
        return
    operands = [Operand("", name, _dims_of(rewriter, name, term)) for name, term in zip(names, terms, strict=True)]
    chosen = _chosen(rewriter, operands, set("".join(terms)) - set(result))
    if chosen is None:
        rewriter.passed_on()
        return
    label, layout = chosen
    layout = following(rewriter, (operand.value for operand in operands), layout)
    made = tuple(_factors(rewriter, [operand], label, layout)[""] for operand in operands)
    args = {**rewriter.node.args, "tensors": made}
    if label in result:
        rewriter.keep(args, Shard(dim=result.index(label), layout=layout))
        return
    out = rewriter.out()
    rewriter.reduced(rewriter.one("aten.einsum.default", args, out), name=out.name)


def _dims_of(rewriter: Rewriter, name: Name, term: str) -> tuple[str, ...]:
    return tuple("" if is_one(extent) else letter for extent, letter in zip(rewriter.shape(name), term, strict=True))


RULES: Mapping[str, Rule] = {
    "aten.linear.default": linear,
    "aten.einsum.default": einsum,
    "aten.matmul.default": matmul,
    "aten.mm.default": _plain(("self", "mat2"), (("m", _SUM), (_SUM, "n"))),
    "aten.bmm.default": _plain(("self", "mat2"), (("batch", "m", _SUM), ("batch", _SUM, "n"))),
    "aten.mv.default": _plain(("self", "vec"), (("m", _SUM), (_SUM,))),
    "aten.dot.default": _plain(("self", "tensor"), ((_SUM,), (_SUM,))),
    "aten.outer.default": _plain(("self", "vec2"), (("m",), ("n",))),
    "aten.addmm.default": _added("aten.mm.default", ("mat1", "mat2"), ()),
    "aten.baddbmm.default": _added("aten.bmm.default", ("batch1", "batch2"), ("batch",)),
}
