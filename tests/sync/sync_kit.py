"""Ranks of one group as threads of this process: real planes, no worker process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transport_kit import Authority, mesh

from distensor.core import SYSTEM_CLOCK
from distensor.transport import DataPlane
from distensor.transport.group import TransportGroup

T = TypeVar("T")
SECONDS = 60.0
_NAMES = itertools.count()


@contextmanager
def planes_of(ranks: int) -> Iterator[dict[int, DataPlane]]:
    with mesh(Authority(), ranks) as planes:
        yield planes


def in_group(planes: dict[int, DataPlane], ranks: int, run: Callable[[Any], T]) -> list[T]:
    """`run` with each rank's group of the first `ranks` planes, at the same time; the results by rank."""
    name = f"group{next(_NAMES)}"
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def of(rank: int) -> None:
        group = TransportGroup(planes[rank], range(ranks), rank, name=name, timeout=20.0, clock=SYSTEM_CLOCK)
        try:
            results[rank] = run(group)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)
        finally:
            group.shutdown()

    threads = [threading.Thread(target=of, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]


class TwoStages:
    """A model in two stages whose vocabulary of 131 no small number divides; the embedding is tied to the head."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(131, 5)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.first.bias.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)  # the global one is shared by all threads
        for parameter in (self.embed.weight, *self.first.parameters(), *self.second.parameters()):
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        self.head = nn.Parameter(self.embed.weight.detach().clone())

    @property
    def stages(self) -> dict[int, dict[str, Tensor]]:
        return {
            0: {"embed": self.embed.weight, "first": self.first.weight, "frozen": self.first.bias},
            1: {"second": self.second.weight, "bias": self.second.bias, "scale": self.scale,
                "unused": self.unused, "head": self.head},
        }  # fmt: skip

    def lower(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.first(self.embed(ids)))

    def upper(self, hidden: Tensor) -> Tensor:
        return ((self.second(hidden) * self.scale) @ self.head.t()).square().sum()


TIED = ("0/embed", "1/head")


def ids_of(rank: int, micro: int) -> Tensor:
    return torch.randint(131, (2 + rank, 3), generator=torch.Generator().manual_seed(10 * rank + micro))
