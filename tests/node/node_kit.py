"""Ranks as threads of one process: real planes, real programs, no cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn
from transport_kit import Authority, mesh

from distensor.core import SYSTEM_CLOCK
from distensor.core.schedules import Schedule, actions_of_rank, rank_of_stage, splits_backward, stages_of_rank
from distensor.node.pipeline import PipelineExecutor, Totals
from distensor.program import Cut, StageRunner, capture, cut
from distensor.transport import DataPlane

T = TypeVar("T")
SECONDS = 30.0


class Chain(nn.Module):
    """ids (rows, length) -> next-token loss, the embedding tied to the head; a skip crosses every border."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + first
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


STAGES = {"embed": 0, "layers.0": 1, "layers.1": 2, "head": 3}


def batch_of(rows: int, ignored: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(rows))
    labels = ids.roll(1, dims=1).clone()
    labels[:, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def pieces_of(module: nn.Module, stages: int) -> Cut:
    captured = capture(module, batch_of(3))
    return cut(captured, {name: place * stages // 4 for name, place in STAGES.items()})


def runners_of(pieces: Cut, rank: int, ranks: int, schedule: Schedule = Schedule.GPIPE) -> dict[int, StageRunner]:
    own = stages_of_rank(schedule, rank, ranks=ranks, stages=len(pieces.programs))
    split = splits_backward(schedule)
    return {stage: StageRunner(pieces.programs[stage], pieces.weights(stage), split_backward=split) for stage in own}


def on_all(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in a thread of its own; the results, or the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]


def executor(
    plane: DataPlane,
    rank: int,
    ranks: int,
    stages: int,
    runners: Mapping[int, StageRunner],
    schedule: Schedule = Schedule.GPIPE,
) -> PipelineExecutor:
    return PipelineExecutor(
        plane=plane,
        rank=rank,
        runners=runners,
        rank_of_stage=[rank_of_stage(schedule, stage, ranks=ranks) for stage in range(stages)],
        device=torch.device("cpu"),
        clock=SYSTEM_CLOCK,
        seed=3,
        replica=0,
    )


def run_pipeline(
    planes: Mapping[int, DataPlane],
    runners: Sequence[Mapping[int, StageRunner]],
    schedule: Schedule,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    sequence: int = 1,
) -> list[Totals]:
    """All ranks through one training pass."""
    ranks = len(runners)
    stages = sum(map(len, runners))

    def of_rank(rank: int) -> Totals:
        actions = actions_of_rank(schedule, rank=rank, ranks=ranks, stages=stages, micro_batches=len(batches))
        ours = executor(planes[rank], rank, ranks, stages, runners[rank], schedule)
        return ours.run(sequence, actions, batches, training=True)

    return on_all([lambda rank=rank: of_rank(rank) for rank in range(ranks)])  # type: ignore[misc]


@contextmanager
def planes_of(ranks: int, *, driver: bool = False) -> Iterator[dict[int, DataPlane]]:
    with mesh(Authority(), ranks, driver=driver) as planes:
        yield planes
