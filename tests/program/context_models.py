"""Small modules over sequences, each with something that a cut of the sequence must get right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
WORDS = 11


class Base(nn.Module):
    """Embedding, something in the middle, a head; the loss is the mean over tokens of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def middle(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden).tanh()  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.middle(self.embed(ids)))
        return self.loss(logits, ids)

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The shift as nanoGPT-like code does it: both sides sliced."""
        return functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), ids[:, 1:].reshape(-1))


class Attention(Base):
    """Attention written out: scores, mask, softmax, values."""

    def middle(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        query, key = self.inner(hidden), hidden
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).tril()
        return scores.masked_fill(~mask, -math.inf).softmax(-1) @ hidden


class ThreeDims(Base):
    """Attention without a head dim."""

    def middle(self, hidden: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.inner(hidden), hidden, hidden, is_causal=True)


class Heads(Base):
    """Attention of four heads of two, with explicit sizes."""

    causal = True

    def heads(self, value: Tensor) -> Tensor:
        rows, length, _ = value.shape
        return value.view(rows, length, 4, 2).transpose(1, 2)

    def middle(self, hidden: Tensor) -> Tensor:
        query, key = self.heads(self.inner(hidden)), self.heads(hidden)
        out = self.attend(query, key, key)
        return out.transpose(1, 2).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


class Bias(Heads):
    """A learnt bias by distance (T5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(query.shape[2])
        bias = self.table((place[:, None] - place[None, :]).clamp(-20, 19) + 20).permute(2, 0, 1)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])


class Einsum(Heads):
    """The same attention by einsum."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.einsum("bhid,bhjd->bhij", query, key).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, value)


class Linear(Base):
    """Attention without softmax: the keys' sum over the sequence first."""

    def middle(self, hidden: Tensor) -> Tensor:
        state = self.inner(hidden).transpose(1, 2) @ hidden
        return hidden @ state


class Dropped(Heads):
    """Attention weights are dropped at random."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3, is_causal=True)


class Dropout(Base):
    def middle(self, hidden: Tensor) -> Tensor:
        return functional.dropout(self.inner(hidden), 0.4) + functional.dropout1d(hidden, 0.3)


class Convolution(Base):
    """Neighbours see each other: no rule, so the sequence is made whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def middle(self, hidden: Tensor) -> Tensor:
        mixed = self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return self.inner(mixed + hidden)  # type: ignore[no-any-return]


class Differences(Base):
    """Each position minus the one before, by two windows that are cut differently."""

    def middle(self, hidden: Tensor) -> Tensor:
        steps = hidden[:, 1:] - hidden[:, :-1]
        return torch.cat([hidden[:, :1], steps], 1) @ self.inner.weight


class Positions(Base):
    """A slice of a parameter is added to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, WIDTH))

    def middle(self, hidden: Tensor) -> Tensor:
        return (hidden + self.places[: hidden.shape[1]]) * self.inner.weight.sum(0)


class Stacked(Base):
    """Parts taken and put together again, along other dims than the sequence."""

    def middle(self, hidden: Tensor) -> Tensor:
        left, right = hidden.chunk(2, -1)
        pairs = torch.stack([left, right.flip(-1)], 1).repeat(1, 1, 1, 2)
        narrow = pairs.narrow(3, 1, 4).unbind(1)
        joined = torch.cat([narrow[0], functional.pad(narrow[1], (1, 0))[..., :4]], -1)
        return self.inner(joined).view(-1, WIDTH).unflatten(0, hidden.shape[:2])  # type: ignore[no-any-return]


class Normalised(Base):
    """A norm written out, one over the sequence, softmax over features and over the sequence."""

    def middle(self, hidden: Tensor) -> Tensor:
        hidden = hidden / hidden.pow(2).mean(-1, keepdim=True).add(1e-3).sqrt()
        hidden = functional.layer_norm(hidden, (WIDTH,), self.inner.bias) * hidden.softmax(-1)
        return hidden - hidden.mean(1, keepdim=True) + hidden.softmax(1)


class Whole(Base):
    """A value computed from the whole sequence meets the sequence again, and parameters meet it."""

    def middle(self, hidden: Tensor) -> Tensor:
        summary = self.inner(hidden.mean(1)).tanh()
        return hidden * summary[:, None]


class Pooled(Base):
    """Classification by the first token; the head meets values that are the same on all ranks."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.middle(self.embed(ids))
        return functional.cross_entropy(self.head(self.pool(hidden)), ids[:, 0])

    def pool(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


class PooledLast(Pooled):
    def pool(self, hidden: Tensor) -> Tensor:
        return hidden[:, -1] + hidden[:, 1:].mean(1)


class PooledMax(Pooled):
    def pool(self, hidden: Tensor) -> Tensor:
        return hidden.amax(1)


class Penalty(Base):
    """A term of the loss that is a mean of squares, and one of parameters alone."""

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return super().loss(logits, ids) + self.inner.weight.square().mean()


class Smoothed(Base):
    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        return functional.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1)


class Picked(Base):
    """The log-probabilities of the tokens by gather, averaged over a mask."""

    def loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        picked = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        mask = (ids != 0).float()
        return -(picked * mask).sum() / mask.sum()


class Shared(Base):
    """The head's weights are the embedding's, and are used on whole values too."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def middle(self, hidden: Tensor) -> Tensor:
        mean = self.embed.weight.mean(0)
        return self.inner(hidden) + mean * hidden.mean((0, 1))


class Wide(Heads):
    """Keys of an encoder's own length, made from the same tokens by a stride."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key[:, :, :3], value[:, :, :3])


@dataclass(frozen=True, kw_only=True)
class Model:
    build: Callable[[], nn.Module]
    loss_weight: Any = None
    wholes: tuple[str, ...] = ()
    """Operations for which the sequence is made whole."""


_GATHERED_ATTENTION = ("scaled_dot_product_attention",)

MODELS: Mapping[str, Model] = {
    "plain": Model(build=Base),
    "attention": Model(build=Attention),
    "three_dims": Model(build=ThreeDims),
    "heads": Model(build=Heads),
    "bias": Model(build=Bias),
    "einsum": Model(build=Einsum),
    "linear": Model(build=Linear),
    "convolution": Model(build=Convolution, wholes=("conv1d",)),
    "differences": Model(build=Differences, wholes=("cat",)),
    "positions": Model(build=Positions),
    "stacked": Model(build=Stacked),
    "normalised": Model(build=Normalised, wholes=("softmax",)),
    "whole": Model(build=Whole),
    "pooled": Model(build=Pooled),
    "pooled_last": Model(build=PooledLast),
    "pooled_max": Model(build=PooledMax, wholes=("amax",)),
    "penalty": Model(build=Penalty),
    "smoothed": Model(build=Smoothed),
    "picked": Model(build=Picked),
    "shared": Model(build=Shared),
    "wide": Model(build=Wide),
}
RANDOM: Mapping[str, Model] = {
    "dropout": Model(build=Dropout),
    "dropped": Model(build=Dropped, wholes=_GATHERED_ATTENTION),
}


def built(model: Model) -> nn.Module:
    torch.manual_seed(5)
    return model.build().train()


def batch(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    return {"ids": torch.randint(0, WORDS, (rows, length), generator=generator)}
