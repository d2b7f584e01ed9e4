"""A small decoder with everything that the axes cut, and its training in one process to compare with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn

VOCABULARY = 30
WIDTH = 16
HEADS = 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias here is zero but for rounding
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(rows, length, HEADS, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(mixed.transpose(1, 2).reshape(rows, length, WIDTH)))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    """ids (rows, length) -> next-token loss; with `tied`, the embedding is the head."""

    def __init__(self, *, tied: bool = True, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embed(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


STAGES = [["embed", "positions", "layers.0"], ["layers.1", "norm", "head"]]
SHARDED = {
    "embed.weight": 0,
    "layers.*.q.weight": 0,
    "layers.*.q.bias": 0,
    "layers.*.k.weight": 0,
    "layers.*.v.weight": 0,
    "layers.*.o.weight": 1,
    "layers.*.up.weight": 0,
    "layers.*.up.bias": 0,
    "layers.*.down.weight": 1,
}
"""Some biases of cut projections are cut, some are left whole."""


def texts(count: int, rows: int = 6, length: int = 9, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of different real length: the labels of the padding are -100."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, 3 + (row * 5) % length :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def train_here(
    module: nn.Module, batches: Sequence[dict[str, Tensor]], *, norm_type: float = 2.0, clip: float = float("inf")
) -> tuple[nn.Module, list[float], list[float]]:
    """(a trained copy, losses, norms before clipping) of AdamW in this process."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip, norm_type)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return module, losses, norms


def worst_difference(ours: Any, reference: nn.Module) -> float:
    """Over all parameters, the norm of the difference relative to the norm of the parameter."""
    return max(
        float((ours[name].detach() - p.detach()).norm() / p.detach().norm()) for name, p in reference.named_parameters()
    )
