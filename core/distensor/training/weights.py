"""What a run warns of before it starts: weights that lose small updates."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class RoundedUpdatesWarning(UserWarning):
    """Trained weights of low precision, in which small updates are lost."""


def warn_of_rounded_updates(module: nn.Module) -> None:
    """Warn if the optimizer would add to weights of 16 bits.

    An update below half a unit in the last place (1/512 of a bfloat16 weight) changes nothing, at any number of steps.
    """
    low = [
        (name, value.dtype)
        for name, value in module.named_parameters()
        if value.requires_grad and value.dtype.is_floating_point and value.dtype.itemsize < 4
    ]
    if low:
        name, dtype = low[0]
        warnings.warn(
            f"{len(low)} trained parameters, {name!r} first, are {dtype}: updates smaller than their rounding are lost "
            "and training stalls; keep them in float32 (module.float()) and compute with precision='bf16'",
            RoundedUpdatesWarning,
            stacklevel=3,
        )
