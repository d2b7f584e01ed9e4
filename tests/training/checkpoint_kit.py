"""Checkpoints of a small made-up model, without a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_manifest import Group
from distensor.training.checkpoint_shards import Fetch, spec_of
from distensor.training.checkpoint_writing import Draft, write_checkpoint

Tensors = dict[Group, dict[str, Tensor]]


def some_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "embed.weight": torch.randn(7, 3, generator=generator),
        "layer.weight": torch.randn(3, 3, generator=generator, dtype=torch.float64),
        "layer.half": torch.randn(4, generator=generator).bfloat16(),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(5),
        "nothing": torch.zeros(0, 4),
    }
    state = {
        "embed.weight/exp_avg": torch.randn(7, 3, generator=generator),
        "embed.weight/step": torch.tensor(3.0),
    }
    return {Group.MODEL: weights, Group.OPTIMIZER: state, Group.RNG: {"now/torch": torch.get_rng_state()}}


def draft_of(tensors: Tensors, step: int = 3, position: dict[str, Any] | None = None) -> Draft:
    specs = {group: {name: spec_of(tensor) for name, tensor in named.items()} for group, named in tensors.items()}
    return Draft(step=step, specs=specs, aliases={"head.weight": "embed.weight"}, run={"lr": 0.1}, position=position)


def fetch_from(tensors: Tensors) -> Fetch:
    return lambda group, name: tensors[group][name]


def write(
    path: Path, *, step: int = 3, seed: int = 0, keep: int = 2, fetch: Callable[..., Tensor] | None = None
) -> Saved:
    tensors, folder = some_tensors(seed), CheckpointFolder(path)
    with folder.writing():
        return write_checkpoint(
            folder, draft_of(tensors, step), fetch or fetch_from(tensors), keep=keep, file_bytes=120
        )
