"""Small models and the same training in one process, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn

from distensor.program import run_module
from distensor.training.parity import relative_difference

CLASSES = 5


class MLP(nn.Module):
    """inputs (rows, 6) -> logits (rows, CLASSES)."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.first(inputs)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


MLP_TWO = [["first", "layers.[0-1]"], ["layers.[2-3]", "last"]]
MLP_FOUR = [["first"], ["layers.[0-1]"], ["layers.[2-3]"], ["last"]]


class TiedLM(nn.Module):
    """Token ids (rows, length) -> next-token loss, the embedding tied to the head."""

    def __init__(self, vocabulary: int = 17, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


TIED_TWO = [["embed", "first"], ["second", "head"]]


def classify(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def points(count: int, rows: int = 8, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, 6, generator=generator),
            torch.randint(CLASSES, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def texts(count: int, rows: int = 6, length: int = 9, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of different real length: the padding's labels are -100."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(17, (rows, length), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, 2 + (row * 5) % length :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def train_here(
    module: nn.Module,
    batches: Iterable[Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Tensor] | None = None,
    clip_norm: float | None = None,
) -> tuple[nn.Module, list[float], list[float]]:
    """(a trained copy, losses, gradient norms before clipping) of plain PyTorch in this process."""
    module = copy.deepcopy(module)
    engine = optimizer(p for p in module.parameters() if p.requires_grad)
    losses, norms = [], []
    for batch in batches:
        engine.zero_grad()
        value = run_module(module, batch, loss)
        value.backward()  # type: ignore[no-untyped-call]
        limit = float("inf") if clip_norm is None else clip_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), limit)))
        engine.step()
        losses.append(float(value.detach()))
    return module, losses, norms


def worst_difference(ours: Mapping[str, Tensor], theirs: nn.Module) -> float:
    """Over all parameters, the norm of the difference relative to the norm of the parameter."""
    return max(relative_difference(ours[name], p.detach()) for name, p in theirs.named_parameters())
