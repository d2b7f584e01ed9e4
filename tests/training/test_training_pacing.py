"""The warm-up of 1F1B is chosen from what the ranks measured, and trains the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import SYSTEM_CLOCK, ParallelConfig
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.core.schedules import Schedule
from distensor.core.warm_up import RankFigures
from distensor.nn import DistributedModel, StageMapping
from distensor.testing.slow_links import SlowPlane
from distensor.training import Trainer
from distensor.training.pacing import AGAIN_AFTER, MEASURED_STEPS, PipelinePacer
from distensor.training.results import StepResult

LINK = LinkSeconds(latency=0.001)
SLOW = LinkSeconds(latency=3)


def figures(*, first: bool, last: bool, link: LinkSeconds = LINK, most: int | None = None) -> RankFigures:
    return RankFigures(
        forward=1,
        backward=2,
        before=None if first else link,
        after=None if last else link,
        most_in_flight=most,
    )


def of_mesh(parallel: ParallelConfig, **options: Any) -> dict[int, RankFigures | None]:
    ranks = parallel.pipeline_parallel
    return {
        rank: figures(first=rank % ranks == 0, last=rank % ranks == ranks - 1, **options)
        for rank in range(parallel.world_size)
    }


PARALLEL = ParallelConfig(pipeline_parallel=3, data_parallel=2, order="pp-dp-tp-cp")


def pacer(schedule: Schedule = Schedule.ONE_F_ONE_B, stages: int = 3) -> PipelinePacer:
    return PipelinePacer(parallel=PARALLEL, schedule=schedule, stages=stages)


def run(made: PipelinePacer, steps: list[Mapping[int, RankFigures | None]]) -> list[bool]:
    asked = []
    for step in steps:
        asked.append(made.order()["measure"])
        made.observe(step if asked[-1] else dict.fromkeys(step), 32)
    return asked


def test_the_first_step_is_not_measured_and_the_next_ones_decide() -> None:
    made = pacer()
    assert run(made, [of_mesh(PARALLEL)] * 6) == [False, *[True] * MEASURED_STEPS, False, False]
    assert made.choice is not None
    assert made.choice.is_plain, "links that take no time to speak of need nothing"
    assert made.order()["warm_up"] == [2, 1, 0]


def test_the_slowest_replica_and_the_smallest_memory_count() -> None:
    slow = of_mesh(PARALLEL)
    slow[3], slow[4] = of_mesh(PARALLEL, link=SLOW)[3], of_mesh(PARALLEL, link=SLOW)[4]
    made = pacer()
    run(made, [slow] * 5)
    assert made.depths > (2, 1, 0)
    bounded = pacer()
    slow[1] = figures(first=False, last=False, most=2)
    run(bounded, [slow] * 5)
    assert bounded.depths[1] == 1, "two in flight"


@pytest.mark.parametrize(
    ("schedule", "stages"), [(Schedule.GPIPE, 3), (Schedule.ZERO_BUBBLE, 3), (Schedule.ONE_F_ONE_B, 6)]
)
def test_other_schedules_have_nothing_to_choose(schedule: Schedule, stages: int) -> None:
    made = pacer(schedule, stages)
    assert run(made, [of_mesh(PARALLEL)] * 5) == [False] * 5
    assert made.order() == {"warm_up": None, "measure": False}


def test_one_slow_step_decides_nothing() -> None:
    made = pacer()
    run(made, [of_mesh(PARALLEL), of_mesh(PARALLEL), of_mesh(PARALLEL, link=SLOW), of_mesh(PARALLEL)])
    assert made.choice is not None
    assert made.choice.is_plain


def test_ranks_that_say_nothing_leave_the_schedule_as_it_is() -> None:
    made = pacer()
    silent = {rank: found for rank, found in of_mesh(PARALLEL).items() if rank % 3 != 1}
    run(made, [silent] * 6)
    assert made.choice is None


def test_links_are_measured_again_and_the_choice_follows_them() -> None:
    made = pacer()
    run(made, [of_mesh(PARALLEL)] * (1 + MEASURED_STEPS))
    assert made.choice is not None
    assert (made.rounds, made.choice.is_plain) == (1, True)
    slow = of_mesh(PARALLEL, link=SLOW)
    asked = run(made, [slow] * (AGAIN_AFTER + MEASURED_STEPS + 1))
    assert asked == [False] * AGAIN_AFTER + [True] * MEASURED_STEPS + [False]
    assert (made.rounds, made.depths > (2, 1, 0)) == (2, True)
    assert made.figures[0].after == SLOW
    run(made, [of_mesh(PARALLEL)] * (AGAIN_AFTER + MEASURED_STEPS))
    assert (made.rounds, made.choice.is_plain) == (3, True)


class Steps(nn.Module):
    """ids (rows, length) -> next-token loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(session: Any, schedule: str) -> list[StepResult]:
    stages = StageMapping([["embed", "layers.0"], ["layers.1"], ["layers.2", "head"]])
    ids = torch.randint(12, (12, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    model = DistributedModel(Steps(), stage_mapping=stages)
    parallel = ParallelConfig(pipeline_parallel=3)
    with Trainer(
        model, parallel=parallel, schedule=schedule, micro_batches=12, session=session, progress=False
    ) as trainer:
        return [trainer.step(batch) for _ in range(6)]


def test_slow_links_deepen_the_warm_up_and_change_no_number(caplog: pytest.LogCaptureFixture) -> None:
    """Links of 20 ms around stages of a few: 1F1B runs further ahead from the fifth step on."""
    with thread_session(3) as session:
        reference = train(session, "gpipe")
    with thread_session(3) as session:
        quick = dict(session.planes)
        slow = {
            rank: SlowPlane(plane, lambda *_: LinkSeconds(latency=0.02), SYSTEM_CLOCK) for rank, plane in quick.items()
        }
        session.planes = slow
        with caplog.at_level("INFO", logger="distensor.training.pacing"):
            results = train(session, "1f1b")
        for plane in slow.values():
            plane.close()
        measures = session.measures
    assert [result.loss for result in results] == [result.loss for result in reference]
    assert [result.warm_up for result in results[:4]] == [()] * 4
    assert results[4].warm_up > (2, 1, 0)
    assert "1F1B warm-up" in caplog.text
    neighbours = [("node 0", "node 1"), ("node 1", "node 0"), ("node 1", "node 2"), ("node 2", "node 1")]
    assert sorted(measures.links) == neighbours
    assert min(link.latency for link in measures.links.values()) >= 0.02
    assert sorted(measures.speed) == ["node 0", "node 1", "node 2"]
    assert min(measures.speed.values()) > 0
