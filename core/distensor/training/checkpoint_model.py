"""The module's side of a checkpoint: which of its tensors are saved, under which names, and back into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distensor.core.errors import ConfigError
from distensor.training.checkpoint_fit import check_fit
from distensor.training.checkpoint_manifest import Group
from distensor.training.checkpoint_shards import read_tensors, spec_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distensor.training.checkpoint_folder import Saved


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    """What `module.state_dict()` holds: each tensor once, and further names of tied ones -> the name that stays."""

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]


def model_tensors(module: nn.Module) -> ModelTensors:
    """The living tensors. Raises ConfigError for a state dict with something else in it."""
    import torch

    first: dict[int, str] = {}
    tensors, aliases = {}, {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"state_dict()[{name!r}] is a {type(value).__name__}: a checkpoint holds only tensors")
        known = first.setdefault(id(value), name)
        if known == name:
            tensors[name] = value
        else:
            aliases[name] = known
    return ModelTensors(tensors=tensors, aliases=aliases)


def check_model(module: nn.Module, saved: Saved) -> None:
    """Raises ConfigError with everything in which the checkpoint is of another model."""
    own = model_tensors(module)
    check_fit(
        saved.manifest.specs(Group.MODEL),
        {name: spec_of(tensor) for name, tensor in own.tensors.items()},
        where=str(saved.path),
        more=_other_ties(saved.manifest.aliases, own.aliases),
    )


def _other_ties(saved: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    lines = [f"{name!r} is tied to {saved[name]!r} in the checkpoint only" for name in saved if name not in own]
    lines += [f"{name!r} is tied to {own[name]!r} in the model only" for name in own if name not in saved]
    return lines


def fill_model(module: nn.Module, saved: Saved) -> None:
    """Copy the checkpoint's tensors into the module's; `check_model` has been called.

    Raises:
        CheckpointError: a file does not hold what the manifest says.
    """
    import torch

    own = model_tensors(module).tensors
    with torch.no_grad():
        for name, tensor in read_tensors(saved.path, saved.manifest, Group.MODEL):
            own[name].copy_(tensor)
