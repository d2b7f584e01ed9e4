"""Weights as one safetensors file: written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distensor.core.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from torch import Tensor, nn


def save_weights(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write beside the target, flush to the disk, then rename over it.

    Raises:
        StoreError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.replace(target)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"weights cannot be written to {target}: {error}") from error


def load_weights(path: str | Path, module: nn.Module) -> None:
    """Fill `module` from a file of `save_weights`.

    Raises:
        StoreError: the file cannot be read or is not a safetensors file.
        ConfigError: a name is missing or too many, or a shape or dtype differs.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"weights cannot be read from {path}: {error}") from error
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    missing, unknown = named.keys() - tensors.keys(), tensors.keys() - named.keys()
    own = module.state_dict().keys()
    if unknown or missing & own:
        raise ConfigError(
            f"{path} does not fit the module: missing {sorted(missing & own)[:5]}, unknown {sorted(unknown)[:5]}"
        )
    for name, tensor in tensors.items():
        target = named[name]
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise ConfigError(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, the module's is "
                f"{tuple(target.shape)} {target.dtype}"
            )
    with torch.no_grad():  # only now: a file that does not fit changes nothing
        for name, tensor in tensors.items():
            named[name].copy_(tensor)
