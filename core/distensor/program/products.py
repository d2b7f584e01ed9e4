"""Which products of a program can put off the gradients of their weights, found from the graph alone.

A weight's gradient may wait when every way from the parameter leads into a product's place for weights, at most through
transposes and casts. Then the parameter gets its whole gradient from products, once for each backward pass. A parameter
that is also used in another way gets its gradient at once, and so do the products that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from distensor.program.values import DType, Node, ProgramData, Ref, WeightRef

WEIGHT_PLACES: Mapping[str, tuple[str, ...]] = {
    "aten.linear.default": ("weight", "bias"),
    "aten.mm.default": ("mat2",),
    "aten.matmul.default": ("other",),
    "aten.addmm.default": ("self", "mat2"),
    "aten.embedding.default": ("weight",),
}
"""Operation -> its arguments that are weights. The one argument left is the value."""
MATRICES = frozenset({"weight", "mat2", "other"})
THROUGH = frozenset(
    {
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.numpy_T.default",
        "aten.to.dtype",
        "aten.contiguous.default",
        "aten.clone.default",
    }
)
"""Operations of one tensor that a weight may go through: they keep its number of dims."""
PLAIN: Mapping[str, tuple[tuple[str, object], ...]] = {
    "aten.addmm.default": (("beta", 1), ("alpha", 1)),
    "aten.embedding.default": (("scale_grad_by_freq", False), ("sparse", False)),
}
"""Arguments that must be as they are by default."""
REAL = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def putting_off(program: ProgramData) -> dict[int, int]:
    """Products that can put off their weights' gradients: index of the node -> number of its group.

    Products of one group share a parameter, which must get all their gradients in one piece.
    """
    return _Analysis(program).run()


@dataclass(slots=True)
class _Analysis:
    program: ProgramData
    origin: dict[Ref | WeightRef, str] = field(default_factory=dict)
    """Values that are a parameter, at most transposed or cast -> the parameter."""
    two_dims: set[str] = field(default_factory=set)

    def run(self) -> dict[int, int]:
        for spec in self.program.parameters:
            if spec.requires_grad and spec.dtype in REAL:
                self.origin[WeightRef(spec.name)] = spec.name
                if len(spec.shape) == 2:
                    self.two_dims.add(spec.name)
        uses: dict[str, list[int]] = {}
        products: dict[int, set[str]] = {}
        for index, node in enumerate(self.program.nodes):
            if self._passes_on(node):
                continue
            origins = self._origins(node)
            if origins and self._is_product(node):
                products[index] = origins
            for name in origins:
                uses.setdefault(name, []).append(index)
        mixed = {self.origin[Ref(name)] for name in self.program.results if Ref(name) in self.origin}
        return _grouped(_without_mixed(products, uses, mixed))

    def _passes_on(self, node: Node) -> bool:
        """A transpose or cast of a weight is that weight."""
        value = node.args.get("self")
        if node.op not in THROUGH or not isinstance(value, (Ref, WeightRef)) or value not in self.origin:
            return False
        self.origin[Ref(str(node.out[0]))] = self.origin[value]
        return True

    def _origins(self, node: Node) -> set[str]:
        return {self.origin[value] for value in node.references() if value in self.origin}

    def _is_product(self, node: Node) -> bool:
        places = WEIGHT_PLACES.get(node.op)
        if places is None or any(node.args.get(name, value) != value for name, value in PLAIN.get(node.op, ())):
            return False
        weights = {name: value for name, value in node.args.items() if name in places and value is not None}
        others = [value for name, value in node.args.items() if name not in places]
        return all(map(self._fits, weights.items())) and not any(self._is_weight(value) for value in others)

    def _is_weight(self, value: object) -> bool:
        return isinstance(value, (Ref, WeightRef)) and value in self.origin

    def _fits(self, place: tuple[str, object]) -> bool:
        """Every weight of the product is a trained one, and a matrix is a matrix."""
        name, value = place
        if not isinstance(value, (Ref, WeightRef)):
            return False
        origin = self.origin.get(value)
        return origin is not None and (name not in MATRICES or origin in self.two_dims)


def _without_mixed(
    products: Mapping[int, set[str]], uses: Mapping[str, list[int]], mixed: set[str]
) -> dict[int, set[str]]:
    """Products none of whose parameters is used by anything else than products that stay."""
    left = dict(products)
    while True:
        mixed = mixed | {name for name, places in uses.items() if not all(place in left for place in places)}
        kept = {index: names for index, names in left.items() if not names & mixed}
        if len(kept) == len(left):
            return kept
        left = kept


def _grouped(products: Mapping[int, set[str]]) -> dict[int, int]:
    """Number the sets of products that share parameters."""
    group_of: dict[str, int] = {}
    for index, names in products.items():
        met = {group_of[name] for name in names if name in group_of}
        for name in [*names, *_members(group_of, met)]:
            group_of[name] = index
    return {index: group_of[next(iter(names))] for index, names in products.items()}


def _members(group_of: Mapping[str, int], groups: set[int]) -> Iterator[str]:
    return iter([name for name, group in group_of.items() if group in groups])
