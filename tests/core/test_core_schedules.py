"""Schedules are data: against recorded orders, and by the properties that any schedule must have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.schedules import Action, Phase, Schedule, actions_of_rank, parse_schedule

RECORDED = json.loads((Path(__file__).parent / "data" / "pipeline_orders.json").read_text())
NAMES = {"GPipe": Schedule.GPIPE, "1F1B": Schedule.ONE_F_ONE_B, "Interleaved1F1B": Schedule.ONE_F_ONE_B}
COMPARABLE = [case for case in RECORDED if case["schedule"] in NAMES]


def actions(schedule: Schedule, ranks: int, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    return [
        actions_of_rank(schedule, rank=rank, ranks=ranks, stages=stages, micro_batches=micro_batches)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("case", COMPARABLE, ids=lambda case: f"{case['schedule']}-{case['ranks']}")
def test_orders_equal_the_recorded_ones(case: dict[str, Any]) -> None:
    ranks = case["ranks"]
    ours = actions(NAMES[case["schedule"]], ranks, ranks * case["stages_per_rank"], case["microbatches"])
    for rank in range(ranks):
        assert [str(action) for action in ours[rank]] == case["order"][str(rank)], f"rank {rank}"


def run_to_the_end(lists: list[tuple[Action, ...]], stages: int) -> None:
    """Run the lists in any order that the data allows; fail if they wait for each other for ever."""
    done: set[tuple[Phase, int, int]] = set()
    waiting = [list(actions) for actions in lists]
    while any(waiting):
        moved = False
        for queue in waiting:
            while queue and _ready(queue[0], stages, done):
                action = queue.pop(0)
                done.add((action.phase, action.stage, action.micro_batch))
                moved = True
        assert moved, f"deadlock before {[str(queue[0]) for queue in waiting if queue]}"


def _ready(action: Action, stages: int, done: set[tuple[Phase, int, int]]) -> bool:
    if action.phase is Phase.FORWARD:
        return action.stage == 0 or (Phase.FORWARD, action.stage - 1, action.micro_batch) in done
    own = (Phase.FORWARD, action.stage, action.micro_batch) in done
    return own and (action.stage == stages - 1 or (Phase.BACKWARD, action.stage + 1, action.micro_batch) in done)


@given(
    schedule=st.sampled_from(Schedule),
    ranks=st.integers(1, 5),
    chunks=st.integers(1, 3),
    micro_batches=st.integers(0, 9),
)
def test_every_schedule_is_complete_and_never_deadlocks(
    schedule: Schedule, ranks: int, chunks: int, micro_batches: int
) -> None:
    stages = ranks * chunks
    lists = actions(schedule, ranks, stages, micro_batches)
    for rank, own in enumerate(lists):
        expected = {
            (phase, stage, micro)
            for phase in Phase
            for stage in range(rank, stages, ranks)
            for micro in range(micro_batches)
        }
        assert {(action.phase, action.stage, action.micro_batch) for action in own} == expected
        assert len(own) == len(expected)
    run_to_the_end(lists, stages)


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_1f1b_holds_no_more_activations_than_its_distance_to_the_end(ranks: int, micro_batches: int) -> None:
    for rank, own in enumerate(actions(Schedule.ONE_F_ONE_B, ranks, ranks, micro_batches)):
        held = peak = 0
        for action in own:
            held += 1 if action.phase is Phase.FORWARD else -1
            peak = max(peak, held)
        assert peak == min(ranks - rank, micro_batches)


def test_stages_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"3 stages.*pipeline_parallel=2"):
        actions_of_rank(Schedule.GPIPE, rank=0, ranks=2, stages=3, micro_batches=1)


def test_a_schedule_that_is_known_but_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOptionError, match="zero_bubble"):
        parse_schedule("zero_bubble")
    with pytest.raises(ConfigError, match="1f1b"):
        parse_schedule("1f2b")
