"""Pipelines of every schedule and shape against one process, the ranks as threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer


class Deep(nn.Module):
    """ids (rows, length) -> next-token loss; eight unequal blocks, the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


UNEVEN = [["embed", "blocks.[0-3]"], ["blocks.4"], ["blocks.5"], ["blocks.[6-7]", "head"]]
TWO_EACH = [["embed"], *([f"blocks.{index}"] for index in range(6)), ["blocks.[6-7]", "head"]]


def texts(rows: int, length: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(12, (rows, length), generator=torch.Generator().manual_seed(10 * rows + length))
    labels = ids.roll(-1, 1).clone()
    labels[0, 1:] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with thread_session(4) as opened:
        yield opened


def trainer(session: Any, stages: list[list[str]], schedule: str, micro_batches: int | None, ranks: int = 4) -> Trainer:
    model = DistributedModel(Deep(), stage_mapping=StageMapping(stages))
    parallel = ParallelConfig(pipeline_parallel=ranks, data_parallel=4 // ranks)
    return Trainer(
        model, parallel=parallel, schedule=schedule, micro_batches=micro_batches, session=session, progress=False
    )


def check_gradients(made: Trainer, batch: dict[str, Tensor]) -> None:
    found = made.gradients(batch)
    module = Deep()
    module(**batch).backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert found.keys() == wanted.keys()
    differences = [found[name] - gradient for name, gradient in wanted.items() if gradient is not None]
    assert len(differences) == len(wanted)
    assert norm(differences) <= 1e-6 * norm([gradient for gradient in wanted.values() if gradient is not None])


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_fewer_micro_batches_than_stages(session: Any, schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    """PRF-03: 4 ranks with 1, 2 and 3 micro-batches; the bubble is said."""
    for micro_batches, bubble in ((1, 75), (2, 60), (3, 50)):
        with trainer(session, UNEVEN, schedule, micro_batches) as made:
            check_gradients(made, texts(7))
            if schedule == "1f1b":
                made.step(texts(7))
                said = f"{micro_batches} micro-batches over 4 ranks: ranks of equal speed wait {bubble} %"
                assert said in caplog.text


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("gpipe", UNEVEN), ("1f1b", UNEVEN), ("zero_bubble", UNEVEN), ("looped_bfs", TWO_EACH),
        ("interleaved", TWO_EACH), ("zero_bubble", TWO_EACH), ("zbv", TWO_EACH), ("gpipe", TWO_EACH),
    ],
)  # fmt: skip
def test_rows_that_do_not_divide_and_lengths_that_change(session: Any, schedule: str, stages: list[list[str]]) -> None:
    """SHP-01 (10 rows in 4 micro-batches), other lengths in later steps, a batch with fewer rows than micro-batches."""
    with trainer(session, stages, schedule, 4) as made:
        for rows, length in ((10, 5), (6, 9), (3, 4)):
            check_gradients(made, texts(rows, length))


def test_two_replicas_of_a_zero_bubble_pipeline(session: Any) -> None:
    """Buckets are summed over the replicas while weight gradients still come; 5 rows are shared unevenly."""
    stages = [["embed", "blocks.[0-2]"], ["blocks.[3-7]", "head"]]
    with trainer(session, stages, "zero_bubble", 3, ranks=2) as made:
        check_gradients(made, texts(5))
        check_gradients(made, texts(1))


def test_two_ranks_and_ten_rows_in_four_micro_batches(session: Any) -> None:
    """SHP-01 as it was reported: pipeline of 2, batch 10, 4 micro-batches."""
    stages = [["embed", "blocks.[0-3]"], ["blocks.[4-7]", "head"]]
    with trainer(session, stages, "1f1b", 4, ranks=2) as made:
        check_gradients(made, texts(10))
