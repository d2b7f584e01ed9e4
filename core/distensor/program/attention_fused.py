"""One tile of attention by torch's fused kernel for CPUs, which never writes the scores down.

Shapes as in `attention_tiles`: query [B, G, R, T, D], key and value [B, G, 1, S, D]. The kernel knows no groups: where
all queries see all keys, the R query heads of a key head are more rows; under causality they go one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

FUSED_TILE = 1 << 20
"""Rows and columns of a tile: the kernel has tiles of its own."""


def is_fused_for(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel can run on these: on a CPU, with keys and values of one width."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and query.numel() > 0


def fused_attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(average of the values, log of the sum [.., T, 1]); `causal`: row i sees the columns up to i."""
    made = [_forward(part, key[:, :, 0], value[:, :, 0], 0.0, causal, scale=scale) for part in _parts(query, causal)]
    out, logs = (_whole([found[index] for found in made], query, causal) for index in (0, 1))
    return out, logs.unsqueeze(-1)


def fused_gradients(
    query: Tensor,
    shard: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values of one tile.

    `results` are the gradient of the output, the output and the log of the sum [.., T, 1] over all tiles of the rows.
    """
    key, value = (part[:, :, 0] for part in shard)
    gradient, out, logs = (_parts(part, causal) for part in (results[0], results[1], results[2].squeeze(-1)))
    made = [
        _backward(gradient[index], part, key, value, out[index], logs[index], 0.0, causal, scale=scale)
        for index, part in enumerate(_parts(query, causal))
    ]
    keys, values = (sum((found[at] for found in made[1:]), made[0][at]).unsqueeze(2) for at in (1, 2))
    return _whole([found[0] for found in made], query, causal), keys, values


def _parts(value: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """[B, G, R, T, ..] as tensors [B, G, rows, ..]."""
    return value.unbind(2) if causal else (value.flatten(2, 3),)


def _whole(parts: list[Tensor], like: Tensor, causal: bool) -> Tensor:
    """The parts as [B, G, R, T, ..] again."""
    if causal:
        return torch.stack(parts, 2)
    return parts[0].reshape(*like.shape[:4], *parts[0].shape[3:])
