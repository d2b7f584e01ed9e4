"""The state of an optimizer whose weights are cut over a group, as the state of whole weights, and back.

Only elementwise optimizers work on cut weights: each field is either a counter, the same on every rank, or has one
element for each of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from distensor.core.errors import ConfigError

if TYPE_CHECKING:
    from distensor.optim.updater import State, Updater
    from distensor.sync import WeightStore


def whole_state(state: State, store: WeightStore) -> dict[str, dict[str, Tensor]]:
    """Fields of whole weights; all ranks of the store's group call it together."""
    if not store.cut:
        return {key: dict(fields) for key, fields in state.items()}
    found: dict[str, dict[str, Tensor]] = {key: {} for key in state}
    for field in sorted({field for fields in state.values() for field in fields}):
        parts = {key: fields[field] for key, fields in state.items() if field in fields}
        counters = {key: value for key, value in parts.items() if value.dim() == 0}
        whole = store.whole({key: value for key, value in parts.items() if key not in counters})
        for key, value in (whole | counters).items():
            found[key][field] = value
    return found


def part_state(state: State, store: WeightStore, updater: Updater) -> State:
    """What this rank keeps of each field.

    Raises:
        ConfigError: a state of parameters that are not here, or fields of another size than theirs.
    """
    if not store.cut:
        return state
    if unknown := sorted(state.keys() - updater.keys):
        raise ConfigError(f"optimizer state: {unknown[0][:100]!r} is no trainable parameter here")
    return {key: _parts(key, fields, store, updater) for key, fields in state.items()}


def _parts(key: str, fields: Mapping[str, Tensor], store: WeightStore, updater: Updater) -> dict[str, Tensor]:
    counters = {field for field, (_, shape) in updater.layout(key).items() if shape == ()}
    parts: dict[str, Tensor] = {}
    for field, value in fields.items():
        expected = () if field in counters else store.shape(key)
        if tuple(value.shape) != expected:
            raise ConfigError(f"optimizer state of {key!r}: {field} is {tuple(value.shape)}; expected {expected}")
        parts[field] = value if field in counters else store.part(key, value)
    return parts
