"""The user's batch as named tensors: a dict, a tuple (inputs, targets) or a tensor, nested as deep as it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from distensor.core.errors import BatchError

Batch: TypeAlias = Any
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Count: TypeAlias = Callable[[Any], Any]
"""loss_weight as a function: how many elements the loss of a batch is the mean over."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the batch, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that is no tensor: part of what was captured, the same in every batch."""

    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Keyed:
    """A mapping; its items are sorted by key."""

    items: tuple[tuple[str, Structure], ...]


@dataclass(frozen=True, slots=True)
class Listed:
    """A tuple or a list."""

    items: tuple[Structure, ...]


Structure: TypeAlias = "Leaf | Fixed | Keyed | Listed"


def flatten(batch: Batch) -> tuple[Structure, dict[str, Tensor]]:
    """The structure of a batch and its tensors by name.

    Raises:
        BatchError: a value that is neither tensor nor plain, or a batch without tensors.
    """
    tensors: dict[str, Tensor] = {}
    structure = _flatten(batch, "", tensors)
    if not tensors:
        raise BatchError(f"the batch holds no tensor: {type(batch).__name__}")
    return structure, tensors


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Structure:
    if isinstance(value, Tensor):
        name = path or "input"
        tensors[name] = value
        return Leaf(name)
    if isinstance(value, Mapping):
        keys = sorted(value, key=str)
        return Keyed(tuple((str(key), _flatten(value[key], _join(path, key), tensors)) for key in keys))
    if isinstance(value, (tuple, list)):
        names = ("inputs", "targets") if not path and len(value) == 2 else range(len(value))
        pairs = zip(names, value, strict=True)
        return Listed(tuple(_flatten(item, _join(path, name), tensors) for name, item in pairs))
    if value is None or isinstance(value, (bool, int, float, str)):
        return Fixed(value)
    raise BatchError(
        f"{path or 'the batch'} is a {type(value).__name__}; a batch holds tensors, and numbers, words or None"
    )


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def rebuild(structure: Structure, tensors: Mapping[str, Tensor]) -> Any:
    """The batch again: mappings as dicts, sequences as tuples."""
    if isinstance(structure, Leaf):
        return tensors[structure.name]
    if isinstance(structure, Keyed):
        return {key: rebuild(item, tensors) for key, item in structure.items}
    if isinstance(structure, Listed):
        return tuple(rebuild(item, tensors) for item in structure.items)
    return structure.value


def difference(captured: Structure, given: Structure, path: str = "batch") -> str | None:
    """What differs between the captured batch and a later one, in words."""
    if isinstance(captured, Keyed) and isinstance(given, Keyed):
        return _keyed_difference(captured, given, path)
    if isinstance(captured, Listed) and isinstance(given, Listed):
        if len(captured.items) != len(given.items):
            return f"{path} has {len(given.items)} items; captured with {len(captured.items)}"
        pairs = zip(captured.items, given.items, strict=True)
        found = (difference(one, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs))
        return next((text for text in found if text), None)
    if captured == given:
        return None
    return f"{path} is {_word(given)}; captured with {_word(captured)}"


def _keyed_difference(captured: Keyed, given: Keyed, path: str) -> str | None:
    first, second = dict(captured.items), dict(given.items)
    if first.keys() != second.keys():
        return f"{path} has the keys {sorted(second)}; captured with {sorted(first)}"
    found = (difference(first[key], second[key], f"{path}[{key!r}]") for key in first)
    return next((text for text in found if text), None)


def _word(structure: Structure) -> str:
    if isinstance(structure, Fixed):
        return repr(structure.value)
    return {Leaf: "a tensor", Keyed: "a mapping", Listed: "a tuple or list"}[type(structure)]


class Wrapper(torch.nn.Module):
    """Module plus loss over the flat tensors of a batch: what is captured."""

    def __init__(
        self,
        module: torch.nn.Module,
        structure: Structure,
        names: Sequence[str],
        loss: Loss | None,
        count: Count | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.structure = structure
        self.names = tuple(names)
        self.loss = loss
        self.count = count

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch = rebuild(self.structure, dict(zip(self.names, tensors, strict=True)))
        loss = run_module(self.module, batch, self.loss)
        if self.count is None:
            return (loss,)
        count = self.count(batch)
        return loss, count if isinstance(count, Tensor) else torch.scalar_tensor(count, dtype=torch.int64)


def run_module(module: torch.nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    """The loss of one batch, by the rules that `Trainer` documents. Plain eager PyTorch."""
    outputs = _call(module, batch, whole=loss is None)
    if loss is not None:
        return _scalar(loss(outputs, batch), "loss(outputs, batch)")
    if isinstance(outputs, Tensor):
        return _scalar(outputs, "the module without `loss`")
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        raise BatchError(
            f"the module returned {type(outputs).__name__} without a loss; return a scalar tensor or something with "
            "`.loss` (does the batch hold the labels?), or pass loss=callable(outputs, batch)"
        )
    return _scalar(found, "the module's `.loss`")


def _call(module: torch.nn.Module, batch: Batch, whole: bool) -> Any:
    """A dict gives keywords, a tuple (inputs, targets) gives inputs to the module and all to the loss."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, (tuple, list)) and whole:
        return module(*batch)
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _scalar(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(f"{what} gave {shown}; expected one real number as a tensor")
    return value


def leaves(structure: Structure) -> Iterator[str]:
    """Names of the tensors, in order."""
    if isinstance(structure, Leaf):
        yield structure.name
    elif isinstance(structure, Keyed):
        for _, item in structure.items:
            yield from leaves(item)
    elif isinstance(structure, Listed):
        for item in structure.items:
            yield from leaves(item)
