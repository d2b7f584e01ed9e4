"""Dropout and other draws. Each place in the graph (site) has its own stream, seeded by (seed, site).

So the same seed gives the same masks on every run and under every cut of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_MASK = 2**64 - 1


def mix(seed: int, site: int) -> int:
    """splitmix64 of both: neighbouring seeds and sites give unrelated streams."""
    state = (seed * 0x9E3779B97F4A7C15 + site * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


class Draws:
    """The random state of one runner; `start` is called before each forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = None if device.type == "meta" else torch.Generator(device=device)
        self._seed = 0
        self.training = True

    def start(self, seed: int | None, training: bool) -> None:
        self._seed = 0 if seed is None else seed
        self.training = training

    def _at(self, site: int) -> torch.Generator | None:
        if self._generator is not None:
            self._generator.manual_seed(mix(self._seed, site))
        return self._generator

    def dropout(self, site: int, value: Tensor, p: float, train: bool) -> Tensor:
        if not (train and self.training) or p == 0:
            return value
        return value * self._keep(site, value, value.shape, p)

    def feature_dropout(self, site: int, value: Tensor, p: float, train: bool) -> Tensor:
        """Whole channels (dim 1) at once, as torch.nn.Dropout1d to Dropout3d do."""
        if not (train and self.training) or p == 0:
            return value
        shape = (*value.shape[:2], *(1 for _ in value.shape[2:]))
        return value * self._keep(site, value, shape, p)

    def _keep(self, site: int, like: Tensor, shape: Sequence[int], p: float) -> Tensor:
        mask = torch.empty(shape, dtype=like.dtype, device=like.device)
        if p >= 1:
            return mask.zero_()
        return mask.bernoulli_(1 - p, generator=self._at(site)).div_(1 - p)

    def rand(self, site: int, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.rand(size, dtype=dtype, device=self._device, generator=self._at(site))

    def randn(self, site: int, size: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, dtype=dtype, device=self._device, generator=self._at(site))

    def rand_like(
        self, site: int, like: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None
    ) -> Tensor:
        del memory_format
        return self.rand(site, like.shape, dtype=dtype or like.dtype)

    def randn_like(
        self, site: int, like: Tensor, *, dtype: torch.dtype | None = None, memory_format: Any = None
    ) -> Tensor:
        del memory_format
        return self.randn(site, like.shape, dtype=dtype or like.dtype)

    def attention(
        self,
        site: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0 or not self.training:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * factor
        weights = torch.softmax(scores + _bias(scores, attn_mask, is_causal), dim=-1)
        return weights * self._keep(site, weights, weights.shape, dropout_p) @ value

    @property
    def kernels(self) -> Mapping[str, Callable[..., Any]]:
        """The operations that draw; each takes its site first."""
        return {
            "aten.dropout.default": self.dropout,
            "aten.feature_dropout.default": self.feature_dropout,
            "aten.rand.default": self.rand,
            "aten.rand_like.default": self.rand_like,
            "aten.randn.default": self.randn,
            "aten.randn_like.default": self.randn_like,
            "aten.scaled_dot_product_attention.default": self.attention,
        }


def _bias(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The additive form of an attention mask."""
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores.new_zeros(())
    if mask.dtype is not torch.bool:
        return mask
    return scores.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
