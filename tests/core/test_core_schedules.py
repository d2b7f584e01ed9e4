"""Schedules are data: against recorded orders, and by the properties that any schedule must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_schedules import NAMES

from distensor.core.actions import peak_in_flight
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.pipeline_simulation import StageSeconds, simulate
from distensor.core.schedule_orders import group_sizes
from distensor.core.schedules import (
    Action,
    Phase,
    Schedule,
    actions_of_rank,
    check_pipeline_sizes,
    check_schedule,
    parse_schedule,
    rank_of_stage,
    stages_of_rank,
)

RECORDED = json.loads((Path(__file__).parent / "data" / "pipeline_orders.json").read_text())
ONE = StageSeconds(forward=1, input_gradient=1, weight_gradient=1)


def actions(schedule: Schedule, ranks: int, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    return [
        actions_of_rank(schedule, rank=rank, ranks=ranks, stages=stages, micro_batches=micro_batches)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    "case", RECORDED, ids=lambda case: f"{case['schedule']}-{case['ranks']}-{case['microbatches']}"
)
def test_orders_equal_the_recorded_ones(case: dict[str, Any]) -> None:
    ranks = case["ranks"]
    stages = ranks * (2 if case["schedule"] == "ZBVZeroBubble" else case["stages_per_rank"])
    ours = actions(NAMES[case["schedule"]], ranks, stages, case["microbatches"])
    for rank in range(ranks):
        assert [str(action) for action in ours[rank]] == case["order"][str(rank)], f"rank {rank}"


def chunks_of(schedule: Schedule) -> st.SearchStrategy[int]:
    return {Schedule.INTERLEAVED: st.integers(2, 3), Schedule.ZBV: st.just(2)}.get(schedule, st.integers(1, 3))


@given(data=st.data(), schedule=st.sampled_from(Schedule), ranks=st.integers(1, 6), micro_batches=st.integers(0, 19))
def test_every_schedule_is_complete_and_never_deadlocks(
    data: st.DataObject, schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    stages = ranks * data.draw(chunks_of(schedule))
    lists = actions(schedule, ranks, stages, micro_batches)
    split = schedule in (Schedule.ZERO_BUBBLE, Schedule.ZBV)
    phases = (Phase.FORWARD, *((Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT) if split else (Phase.BACKWARD,)))
    for rank, own in enumerate(lists):
        expected = [
            Action(phase=phase, stage=stage, micro_batch=micro)
            for phase in phases
            for stage in stages_of_rank(schedule, rank, ranks=ranks, stages=stages)
            for micro in range(micro_batches)
        ]
        assert sorted(map(str, own)) == sorted(map(str, expected))
        place = {action: index for index, action in enumerate(own)}
        for action in own:  # whatever a phase works on was made by the phases before it
            before = [phase for phase in phases if phases.index(phase) < phases.index(action.phase)]
            for phase in before:
                earlier = Action(phase=phase, stage=action.stage, micro_batch=action.micro_batch)
                assert place[earlier] < place[action]
    made = simulate(lists, seconds=[ONE] * stages, place=lambda stage: rank_of_stage(schedule, stage, ranks=ranks))
    assert sum(made.busy) == 3 * stages * micro_batches
    assert all(held <= most(schedule, rank, ranks, stages, micro_batches) for rank, held in enumerate(made.in_flight))


def most(schedule: Schedule, rank: int, ranks: int, stages: int, micro_batches: int) -> int:
    """What the schedule promises to hold on a rank at once."""
    chunks = stages // ranks
    ahead = (chunks - 1) * group_sizes(ranks, micro_batches)[0]
    match schedule:
        case Schedule.GPIPE | Schedule.LOOPED_BFS:
            return chunks * micro_batches
        case Schedule.ZERO_BUBBLE:
            return ahead + ranks
        case Schedule.ZBV:
            return 2 * ranks
    return ranks - rank if chunks == 1 else ahead + 2 * (ranks - 1 - rank) + 1


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_1f1b_holds_no_more_activations_than_its_distance_to_the_end(ranks: int, micro_batches: int) -> None:
    for rank, own in enumerate(actions(Schedule.ONE_F_ONE_B, ranks, ranks, micro_batches)):
        assert peak_in_flight(own) == min(ranks - rank, micro_batches)


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 24), chunks=st.integers(1, 3))
def test_zero_bubble_waits_for_less_than_1f1b(ranks: int, micro_batches: int, chunks: int) -> None:
    stages = ranks * chunks
    times = [
        simulate(
            actions(schedule, ranks, stages, micro_batches), seconds=[ONE] * stages, place=lambda stage: stage % ranks
        ).makespan
        for schedule in (Schedule.ZERO_BUBBLE, Schedule.ONE_F_ONE_B)
    ]
    assert times[0] <= times[1]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (4, 5), (4, 6), (4, 11), (3, 7), (4, 2)])
def test_interleaved_with_a_remainder_is_better_than_breadth_first(ranks: int, micro_batches: int) -> None:
    """No slower than all forwards first, and with less in flight; of a multiple it has the time of the definition."""
    stages = 2 * ranks
    place = lambda stage: stage % ranks  # noqa: E731 - one expression
    ours, bfs = (
        simulate(actions(schedule, ranks, stages, micro_batches), seconds=[ONE] * stages, place=place)
        for schedule in (Schedule.INTERLEAVED, Schedule.GPIPE)
    )
    assert ours.makespan <= bfs.makespan
    if micro_batches >= 2 * ranks:
        assert max(ours.in_flight) < max(bfs.in_flight)
    assert ours.makespan <= 3 * (2 * micro_batches + ranks - 1) or micro_batches < ranks


@given(
    micro_batches=st.integers(1, 12),
    deeper=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    last=st.integers(0, 3),
)
def test_1f1b_runs_with_any_falling_warm_up(micro_batches: int, deeper: list[int], last: int) -> None:
    warm_up = [last]
    for step in deeper:
        warm_up.insert(0, warm_up[0] + step)
    ranks = len(warm_up)
    lists = [
        actions_of_rank(
            Schedule.ONE_F_ONE_B, rank=rank, ranks=ranks, stages=ranks, micro_batches=micro_batches, warm_up=warm_up
        )
        for rank in range(ranks)
    ]
    made = simulate(lists, seconds=[ONE] * ranks, place=lambda stage: stage)
    assert made.in_flight == tuple(min(ahead + 1, micro_batches) for ahead in warm_up)


@pytest.mark.parametrize("warm_up", [[1, 2], [1, -1], [3], []])
def test_a_warm_up_that_would_wait_for_ever_is_refused(warm_up: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"for example \[1, 0\]"):
        actions_of_rank(Schedule.ONE_F_ONE_B, rank=0, ranks=2, stages=2, micro_batches=4, warm_up=warm_up)


def test_a_v_brings_the_last_stage_beside_the_first() -> None:
    assert [rank_of_stage(Schedule.ZBV, stage, ranks=3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [stages_of_rank(Schedule.ZBV, rank, ranks=3, stages=6) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert stages_of_rank(Schedule.GPIPE, 1, ranks=3, stages=9) == (1, 4, 7)


def test_stages_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"3 stages.*pipeline_parallel=2"):
        actions_of_rank(Schedule.GPIPE, rank=0, ranks=2, stages=3, micro_batches=1)


@pytest.mark.parametrize(
    ("schedule", "stages", "says"),
    [
        (Schedule.INTERLEAVED, 4, r"4 stages and pipeline_parallel=4.*8 stages, or use schedule='1f1b'"),
        (Schedule.ZBV, 12, r"12 stages and pipeline_parallel=4.*8 stages, or use schedule='zero_bubble'"),
    ],
)
def test_a_schedule_that_cannot_have_these_stages_says_what_would_be_right(
    schedule: Schedule, stages: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_schedule(schedule, ranks=4, stages=stages)


def test_a_schedule_that_is_known_but_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="dualpipev"):
        parse_schedule("dualpipev")
    with pytest.raises(ConfigError, match="zero_bubble"):
        parse_schedule("1f2b")


@pytest.mark.parametrize(
    ("ranks", "stages", "fits"), [(2, 5, "1 or 5"), (4, 6, "2 or 3"), (3, 2, "1 or 2"), (7, 8, "4 or 8")]
)
def test_the_nearest_sizes_that_fit_are_offered(ranks: int, stages: int, fits: str) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_parallel={fits} fits {stages} stages"):
        check_pipeline_sizes(ranks=ranks, stages=stages)
