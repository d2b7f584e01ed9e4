"""How a stage computes: in what precision, and what it keeps for the backward pass."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from distensor.core.errors import ConfigError, UnsupportedOptionError

Choice = TypeVar("Choice", bound=StrEnum)


class Precision(StrEnum):
    """What a forward pass computes in. Parameters, gradients, reductions and the loss stay as the module has them."""

    FP32 = "fp32"
    """As the module itself does."""
    BF16 = "bf16"
    """As under autocast to bfloat16."""


class Recompute(StrEnum):
    """What is computed again in the backward pass instead of being kept."""

    NONE = "none"
    LAYER = "layer"
    """Each repeated module (model.layers.3) on its own: its inputs are kept."""
    STAGE = "stage"
    """The whole stage: only what came from the previous one is kept."""


class ContextAttention(StrEnum):
    """How keys and values reach the queries of other ranks when the sequence is cut."""

    ALL_GATHER = "all_gather"
    RING = "ring"
    ULYSSES = "ulysses"


def parse_precision(value: object) -> Precision:
    if value == "fp16":
        raise UnsupportedOptionError(
            "precision='fp16' is not implemented: gradients below 6e-8 vanish in float16 unless the loss is scaled; "
            "use precision='bf16', which has the range of float32"
        )
    return _parse(Precision, "precision", value)


def parse_recompute(value: object) -> Recompute:
    return _parse(Recompute, "recompute", value)


def parse_context_attention(value: object) -> ContextAttention:
    return _parse(ContextAttention, "context_attention", value)


def _parse(kind: type[Choice], keyword: str, value: object) -> Choice:
    try:
        return kind(str(value))
    except ValueError:
        choices = " or ".join(repr(choice.value) for choice in kind)
        raise ConfigError(f"{keyword}={value!r}: expected {choices}") from None
