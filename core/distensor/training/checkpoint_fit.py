"""Whether a checkpoint is one of this model: every difference found, none of them repaired. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distensor.core.errors import ConfigError
from distensor.training.checkpoint_manifest import TensorSpec

MOST_SHOWN = 20


def differences(saved: Mapping[str, TensorSpec], own: Mapping[str, TensorSpec]) -> list[str]:
    """One line for each tensor that only one side has, or that differs in shape or dtype."""
    lines = _only(saved, own, "the checkpoint", "the model") + _only(own, saved, "the model", "the checkpoint")
    return lines + [
        f"{name!r} is {_show(spec)} in the checkpoint and {_show(own[name])} in the model"
        for name, spec in saved.items()
        if name in own and own[name] != spec
    ]


def _only(here: Mapping[str, TensorSpec], there: Mapping[str, TensorSpec], ours: str, theirs: str) -> list[str]:
    return [f"{name!r} ({_show(here[name])}) is in {ours} and not in {theirs}" for name in here if name not in there]


def check_fit(
    saved: Mapping[str, TensorSpec], own: Mapping[str, TensorSpec], *, where: str, more: Sequence[str] = ()
) -> None:
    """Raises ConfigError with all differences, and those of `more` (the first twenty in words)."""
    found = [*differences(saved, own), *more]
    if found:
        rest = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise ConfigError(f"{where} is a checkpoint of another model: {'; '.join(found[:MOST_SHOWN])}{rest}")


def _show(spec: TensorSpec) -> str:
    return f"{spec.dtype.value} {list(spec.shape)}"
