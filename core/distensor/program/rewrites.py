"""What capture simplifies before the table is asked: operations that do nothing, or have a plainer name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from distensor.program.builder import GraphBuilder, Info, Place

_END = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """One captured operation: its arguments by name (tensors as places) and what is known of its results."""

    name: str
    args: dict[str, Any]
    infos: list[Info]
    builder: GraphBuilder

    @property
    def unchanged(self) -> tuple[str, dict[str, Any]]:
        return self.name, self.args

    @property
    def input(self) -> Place:
        place = self.args.get("self", self.args.get("input"))
        assert isinstance(place, Place)
        return place

    @property
    def input_info(self) -> Info:
        return self.builder.info(self.input.name)


Result: TypeAlias = "Place | tuple[str, dict[str, Any]]"
"""The same variable under another name, or the operation to record instead."""


def _same(call: Rewrite) -> Result:
    return call.input


def _fresh(call: Rewrite) -> Result:
    """A copy of a constant: the value is shared, a write is not."""
    return Place(call.builder.read(call.input))


def _cast(call: Rewrite) -> Result:
    """Every `.to(...)`: a change of dtype, a copy, or nothing. Devices are the worker's business."""
    dtype = call.infos[0].dtype
    if dtype is not call.input_info.dtype:
        return "aten.to.dtype", {"self": call.input, "dtype": dtype.value}
    if call.args.get("copy") or call.name == "aten._to_copy.default":
        return "aten.clone.default", {"self": call.input}
    return call.input


def _detach_in_place(call: Rewrite) -> Result:
    return call.unchanged if call.input_info.requires_grad else call.input


def _slice(call: Rewrite) -> Result:
    whole = call.args.get("start") in (None, 0) and call.args.get("step", 1) == 1
    end = call.args.get("end")
    return call.input if whole and (end is None or end == _END) else call.unchanged


def _reshape(call: Rewrite) -> Result:
    """A view of the shape it has; a real one is kept, with sizes that are known made explicit."""
    if call.infos[0].shape == call.input_info.shape:
        return call.input
    return call.unchanged


def _dropout(call: Rewrite) -> Result:
    return call.input if call.args["p"] == 0 or not call.args["train"] else call.unchanged


def _join(call: Rewrite) -> Result:
    """Without the empty one-dim tensors that torch.cat ignores (caches start as such)."""
    tensors = call.args["tensors"]
    kept = tuple(place for place in tensors if call.builder.info(place.name).shape != (0,))
    if not kept or len(kept) == len(tensors):
        return call.unchanged
    dtypes = {call.builder.info(place.name).dtype for place in tensors}
    if len(kept) == 1 and len(dtypes) == 1:
        return _fresh_of(call, kept[0])
    return (call.name, {**call.args, "tensors": kept}) if len(dtypes) == 1 else call.unchanged


def _fresh_of(call: Rewrite, place: Place) -> Place:
    return Place(call.builder.read(place))


def _renamed(name: str, *, without: tuple[str, ...] = ()) -> Callable[[Rewrite], Result]:
    def rewrite(call: Rewrite) -> Result:
        return name, {key: value for key, value in call.args.items() if key not in without}

    return rewrite


REWRITES: Mapping[str, Callable[[Rewrite], Result]] = {
    "aten.alias.default": _same,
    "aten.lift_fresh.default": _same,
    "aten.lift_fresh_copy.default": _fresh,
    "aten.to.dtype": _cast,
    "aten.to.device": _cast,
    "aten.to.dtype_layout": _cast,
    "aten.to.other": _cast,
    "aten._to_copy.default": _cast,
    "aten.type_as.default": _cast,
    "aten.detach_.default": _detach_in_place,
    "aten.slice.Tensor": _slice,
    "aten.view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.expand.default": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _dropout,
    "aten.cat.default": _join,
    "aten.concat.default": _join,
    "aten.empty.memory_format": _renamed("aten.zeros.default", without=("memory_format",)),
    "aten.empty_like.default": _renamed("aten.zeros_like.default"),
    "aten.new_empty.default": _renamed("aten.new_zeros.default"),
    "aten._unsafe_view.default": _renamed("aten.reshape.default"),
}

INPLACE: Mapping[str, str] = {
    "aten.zero_.default": "aten.zeros_like.default",
}
"""In-place operations whose plain form has another name; the others only lose their underscore."""
