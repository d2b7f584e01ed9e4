"""Cutting tensors and lists along the sequence for context parallelism. Nothing here communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.distributed.agreement import check_member
from distensor.core.errors import ConfigError

T = TypeVar("T")
VIDEO_DIMS = 5


def split_inputs_cp(
    x: Tensor, seq_dim: int, cp_group: dist.ProcessGroup | None = None, *, lengths: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of `x` along `seq_dim`, contiguous; `x` itself where `cp_group` is None.

    Args:
        lengths: the length of each rank's part, for parts that differ; None means equal parts.

    Raises:
        ConfigError: no such dim, a length that the group's size does not divide, or `lengths` that do not add up.
    """
    if cp_group is None:
        return x
    group = check_member(cp_group)
    dim = checked_dim(x.ndim, seq_dim)
    parts = part_lengths(x.shape[dim], group.size(), lengths)
    return x.narrow(dim, sum(parts[: group.rank()]), parts[group.rank()]).contiguous()


def split_inputs_cp_object_list(object_list: list[T], cp_group: dist.ProcessGroup | None = None) -> list[T]:
    """This rank's consecutive part of a list; the list itself where `cp_group` is None.

    Raises:
        ConfigError: a length that the group's size does not divide.
    """
    if cp_group is None:
        return object_list
    group = check_member(cp_group)
    length = part_lengths(len(object_list), group.size(), None)[0]
    return object_list[group.rank() * length : (group.rank() + 1) * length]


def checked_dim(ndim: int, dim: int) -> int:
    """`dim` counted from the front.

    Raises:
        ConfigError: a tensor of `ndim` dims has no such dim.
    """
    if not -ndim <= dim < ndim:
        raise ConfigError(f"seq_dim={dim}: the tensor has {ndim} dims; expected {-ndim} to {ndim - 1}")
    return dim % ndim


def part_lengths(length: int, size: int, lengths: Sequence[int] | None) -> list[int]:
    """How long each rank's part is.

    Raises:
        ConfigError: `size` does not divide `length`, or `lengths` are not `size` numbers with the sum `length`.
    """
    if lengths is not None:
        if len(lengths) != size or sum(lengths) != length or min(lengths) < 0:
            raise ConfigError(
                f"lengths={list(lengths)}: expected {size} lengths, one per rank, that add up to {length}"
            )
        return list(lengths)
    if length % size != 0:
        lower = length - length % size
        raise ConfigError(
            f"{length} cannot divide cp_size {size}: equal parts need a multiple of {size}, such as "
            f"{lower or size} or {lower + size}; give lengths= for parts that differ"
        )
    return [length // size] * size


def find_split(
    shape_tensor: Sequence[int],
    cp_size: int,
    patch_values: tuple[int, int, int] = (1, 2, 2),
    view_factor: int = 1,
) -> torch.Size:
    """The extents (T, H, W) of one rank's part of a video batch of shape (B, C, T, H, W).

    Time is split as far as it goes, then height; width never is. A rank gets whole patches only.

    Args:
        patch_values: the patch size along T, H, W.
        view_factor: how many views lie one after the other along T; each rank gets a part of one view.

    Raises:
        ConfigError: the shape has other dims, or the extents cannot be split `cp_size` ways into whole patches.
    """
    extents = _view_extents(shape_tensor, view_factor)
    factors = split_factors(shape_tensor, cp_size, patch_values, view_factor)
    return torch.Size([extent // factor for extent, factor in zip(extents, factors, strict=True)])


def split_factors(
    shape_tensor: Sequence[int],
    cp_size: int,
    patch_values: tuple[int, int, int] = (1, 2, 2),
    view_factor: int = 1,
) -> tuple[int, int, int]:
    """How many ways `find_split` splits T, H and W; the product is `cp_size`. Arguments and errors are the same."""
    _check_counts(cp_size=cp_size, view_factor=view_factor, patch=min(patch_values))
    extents = _view_extents(shape_tensor, view_factor)
    time = math.gcd(extents[0] // patch_values[0], cp_size)
    height = math.gcd(extents[1] // patch_values[1], cp_size // time)
    if time * height != cp_size:
        raise ConfigError(
            f"cp_size={cp_size}: T={extents[0]} and H={extents[1]} in patches of {patch_values} can be split "
            f"{time} x {height} ways. Split by width dimension is not supported; lower the context-parallel size, "
            f"for example to {time * height}"
        )
    factors = (time, height, 1)
    for name, extent, patch, factor in zip("THW", extents, patch_values, factors, strict=True):
        _check_whole_patches(name, extent, patch, factor)
    return factors


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"find_split({name}={count}): expected an integer of at least 1")


def _view_extents(shape: Sequence[int], view_factor: int) -> tuple[int, int, int]:
    if len(shape) != VIDEO_DIMS:
        raise ConfigError(f"find_split: the shape {tuple(shape)} has {len(shape)} dims; expected (B, C, T, H, W)")
    time, height, width = shape[2:]
    if time % view_factor != 0:
        raise ConfigError(f"find_split: T={time} is no multiple of view_factor={view_factor}")
    return time // view_factor, height, width


def _check_whole_patches(name: str, extent: int, patch: int, factor: int) -> None:
    """What is not split stays whole, so only a split can cut a patch; nothing may become empty."""
    if extent < patch:
        raise ConfigError(f"find_split: {name}={extent} is less than one patch of {patch}")
    if extent % factor != 0 or (factor > 1 and extent // factor % patch != 0):
        raise ConfigError(
            f"find_split: {name}={extent} split {factor} ways gives no whole patches of {patch}; expected a multiple "
            f"of {factor * patch}"
        )
