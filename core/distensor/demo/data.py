"""Text that is on every machine with Python: the documentation topics of the interpreter itself, as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def load_tokens() -> Tensor:
    """All topics, sorted by name, one token a byte."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBatches:
    """`steps` batches of random windows; iterating again gives the same ones."""

    tokens: Tensor
    steps: int
    rows: int
    sequence: int
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            starts = torch.randint(len(self.tokens) - self.sequence, (self.rows,), generator=generator)
            window = torch.stack([self.tokens[start : start + self.sequence] for start in starts.tolist()])
            yield {"input_ids": window, "labels": window}
