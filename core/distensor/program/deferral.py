"""Split backward: products give the gradient of their value at once and keep those of their weights for later.

The gradients are what torch's own backward of the same operation computes, from the same tensors in the same order of
multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

TOGETHER_BYTES = 1 << 20
"""Gradients are handed over in lots of about this size: a call of autograd costs more than a small product."""
Weighted: TypeAlias = "tuple[Tensor, Tensor]"
"""(weight, its gradient)"""


@dataclass(slots=True)
class WeightGradients:
    """What one pass has put off. It holds the values and gradients that it needs until `run`."""

    _waiting: dict[int, list[Callable[[], Sequence[Weighted]]]] = field(default_factory=dict)

    def put(self, group: int, make: Callable[[], Sequence[Weighted]]) -> None:
        self._waiting.setdefault(group, []).append(make)

    def run(self) -> None:
        """Compute what waits and add it to `.grad`, each parameter once; hooks on accumulation run as ever."""
        while self._waiting:
            ready: list[Weighted] = []
            size = 0
            with torch.no_grad():
                while self._waiting and size < TOGETHER_BYTES:
                    made = _sums(self._waiting.pop(next(iter(self._waiting))))
                    ready += made
                    size += sum(gradient.nbytes for _, gradient in made)
            if ready:
                torch.autograd.backward([weight for weight, _ in ready], [gradient for _, gradient in ready])


def _sums(makers: Sequence[Callable[[], Sequence[Weighted]]]) -> list[Weighted]:
    """The gradients of one group, those of the same weight added."""
    sums: dict[int, Weighted] = {}
    for make in makers:
        for weight, gradient in make():
            before = sums.get(id(weight))
            sums[id(weight)] = (weight, gradient if before is None else before[1] + gradient)
    return list(sums.values())


class Deferral:
    """Products of one runner; between `start` and the next one, they put off into one place."""

    def __init__(self) -> None:
        self._sink: WeightGradients | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def start(self, sink: WeightGradients | None) -> None:
        """None: weights get their gradients in the backward pass, as torch does it."""
        self._sink = sink

    def wrap(self, op: str, group: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, the operation `op` of the table, with its weights' gradients put off."""
        rule = RULES[op]

        def product(*arguments: Any) -> Any:
            if self._sink is None or not torch.is_grad_enabled():
                return function(*arguments)
            # Autograd keeps the value, or recomputes it; a second reference would hold it all the same.
            others = (*arguments[: rule.value], None, *arguments[rule.value + 1 :])
            call = _Call(rule=rule, arguments=others, sink=self._sink, group=group)
            value = arguments[rule.value]
            return _Product.apply(self._anchor, value, lambda: function(*arguments), call)  # type: ignore[no-untyped-call]

        return product


@dataclass(frozen=True, slots=True)
class _Rule:
    """`value` is the place of the value among the arguments."""

    value: int
    value_gradient: Callable[[Tensor, Sequence[Any]], Tensor]
    weight_gradients: Callable[[Tensor, Tensor, Sequence[Any]], list[Weighted]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """`arguments` has None in the place of the value."""

    rule: _Rule
    arguments: Sequence[Any]
    sink: WeightGradients
    group: int


class _Product(torch.autograd.Function):
    """(anchor, value, make, call) -> the product that `make` gives. The anchor makes autograd come here although the
    weights are hidden.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, make: Callable[[], Tensor], call: _Call) -> Tensor:
        del anchor
        ctx.call = call
        ctx.save_for_backward(value)
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        call: _Call = ctx.call
        (value,) = ctx.saved_tensors
        (gradient,) = gradients
        rule, arguments = call.rule, call.arguments
        call.sink.put(call.group, lambda: rule.weight_gradients(gradient, value.detach(), arguments))
        return None, rule.value_gradient(gradient, arguments) if ctx.needs_input_grad[1] else None, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _linear_value(gradient: Tensor, arguments: Sequence[Any]) -> Tensor:
    return torch.matmul(gradient, arguments[1])


def _linear_weights(gradient: Tensor, value: Tensor, arguments: Sequence[Any]) -> list[Weighted]:
    rows = _rows(gradient)
    found = [(arguments[1], rows.t() @ _rows(value))]
    if len(arguments) > 2 and arguments[2] is not None:
        found.append((arguments[2], rows.sum(0)))
    return found


def _matmul_value(gradient: Tensor, arguments: Sequence[Any]) -> Tensor:
    return torch.matmul(gradient, arguments[1].t())


def _matrix_gradient(gradient: Tensor, value: Tensor, matrix: Tensor) -> Tensor:
    """Of the right factor, in the order that torch multiplies for its strides."""
    rows, columns = _rows(value), _rows(gradient)
    if matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0):
        return (columns.t() @ rows).t()
    return rows.t() @ columns


def _matmul_weights(gradient: Tensor, value: Tensor, arguments: Sequence[Any]) -> list[Weighted]:
    return [(arguments[1], _matrix_gradient(gradient, value, arguments[1]))]


def _addmm_value(gradient: Tensor, arguments: Sequence[Any]) -> Tensor:
    return torch.mm(gradient, arguments[2].t())


def _addmm_weights(gradient: Tensor, value: Tensor, arguments: Sequence[Any]) -> list[Weighted]:
    bias, _, matrix = arguments[:3]
    return [(matrix, _matrix_gradient(gradient, value, matrix)), (bias, gradient.sum_to_size(bias.shape))]


def _embedding_value(gradient: Tensor, arguments: Sequence[Any]) -> Tensor:
    raise AssertionError("ids have no gradient")


def _embedding_weights(gradient: Tensor, value: Tensor, arguments: Sequence[Any]) -> list[Weighted]:
    weight = arguments[0]
    padding = arguments[2] if len(arguments) > 2 else -1
    dense = torch.ops.aten.embedding_dense_backward(gradient, value, weight.shape[0], padding, False)
    return [(weight, dense)]


RULES: Mapping[str, _Rule] = {
    "aten.linear.default": _Rule(0, _linear_value, _linear_weights),
    "aten.matmul.default": _Rule(0, _matmul_value, _matmul_weights),
    "aten.mm.default": _Rule(0, _matmul_value, _matmul_weights),
    "aten.addmm.default": _Rule(1, _addmm_value, _addmm_weights),
    "aten.embedding.default": _Rule(1, _embedding_value, _embedding_weights),
}
