"""A small Llama-like language model in plain PyTorch, with the parameter names that Hugging Face uses.

Shapes: B batch, S sequence, H heads, K key-value heads, D head size, E hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    vocabulary: int = 256
    hidden: int = 128
    layers: int = 6
    heads: int = 4
    key_value_heads: int = 2
    intermediate: int = 288
    rope_base: float = 10_000.0

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_BSE: Tensor) -> Tensor:  # noqa: N803 - shape legend
        scale = torch.rsqrt(x_BSE.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_BSE * scale)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        size, narrow = config.hidden, config.key_value_heads * config.head_size
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, narrow, bias=False)
        self.v_proj = nn.Linear(size, narrow, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:  # noqa: N803 - shape legend
        batch, sequence, _ = x_BSE.shape
        config = self.config
        q = self.q_proj(x_BSE).view(batch, sequence, config.heads, config.head_size).transpose(1, 2)
        k = self.k_proj(x_BSE).view(batch, sequence, config.key_value_heads, config.head_size).transpose(1, 2)
        v = self.v_proj(x_BSE).view(batch, sequence, config.key_value_heads, config.head_size).transpose(1, 2)
        q, k = rotate(q, cos_SD, sin_SD), rotate(k, cos_SD, sin_SD)
        repeats = config.heads // config.key_value_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, sequence, config.hidden))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x_BSE: Tensor) -> Tensor:  # noqa: N803 - shape legend
        return self.down_proj(F.silu(self.gate_proj(x_BSE)) * self.up_proj(x_BSE))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:  # noqa: N803 - shape legend
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), cos_SD, sin_SD)  # noqa: N806 - shape legend
        return x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))  # type: ignore[no-any-return]


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BSE = self.embed_tokens(input_ids)  # noqa: N806 - shape legend
        cos_SD, sin_SD = rope_tables(input_ids.shape[1], self.config, input_ids.device)  # noqa: N806 - shape legend
        for layer in self.layers:
            x_BSE = layer(x_BSE, cos_SD, sin_SD)  # noqa: N806 - shape legend
        return self.norm(x_BSE)  # type: ignore[no-any-return]


class TinyLlama(nn.Module):
    """forward(input_ids, labels) returns the mean next-token loss; labels of -100 are not counted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits_BSV = self.lm_head(self.model(input_ids))  # noqa: N806 - shape legend
        return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def rope_tables(sequence: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary position embedding (Su et al. 2021, arXiv:2104.09864), each S x D."""
    exponent = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
    angles = torch.outer(torch.arange(sequence, device=device).float(), config.rope_base**-exponent)
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:  # noqa: N803 - shape legend
    left, right = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SD + torch.cat((-right, left), dim=-1) * sin_SD


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
