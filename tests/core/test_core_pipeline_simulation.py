"""The event simulation against recorded makespans of all schedules, with and without links."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_schedules import NAMES

from distensor.core.actions import backward, forward
from distensor.core.errors import ConfigError
from distensor.core.pipeline_bubble import predicted_bubble
from distensor.core.pipeline_simulation import (
    LinkSeconds,
    Simulation,
    StageSeconds,
    ideal_bubble,
    ideal_seconds,
    simulate,
)
from distensor.core.schedules import Schedule, actions_of_rank, rank_of_stage

RECORDED = json.loads((Path(__file__).parent / "data" / "pipeline_simulations.json").read_text())


def run(
    schedule: Schedule,
    micro_batches: int,
    seconds: list[StageSeconds],
    link: LinkSeconds,
    ranks: int,
    warm_up: list[int] | None = None,
) -> Simulation:
    stages = len(seconds)
    lists = [
        actions_of_rank(schedule, rank=rank, ranks=ranks, stages=stages, micro_batches=micro_batches, warm_up=warm_up)
        for rank in range(ranks)
    ]
    links = {(a, b): link for a in range(ranks) for b in range(ranks) if a != b}
    return simulate(
        lists,
        seconds=seconds,
        place=lambda stage: rank_of_stage(schedule, stage, ranks=ranks),
        links=links,
        link_per_border=True,  # as the recorded ones were taken
    )


def setting_of(text: str, ranks: int) -> tuple[list[float], LinkSeconds]:
    """Work per rank and phase, and the link, out of the recorded words."""
    unequal = re.search(r"\[(.*)\]", text)
    work = [float(part) for part in unequal[1].split(",")] if unequal else [1.0] * ranks
    link = re.search(r"(serialized )?link (\d\.\d)", text)
    if link is None:
        return work, LinkSeconds()
    return work, LinkSeconds(occupied=float(link[2])) if link[1] else LinkSeconds(latency=float(link[2]))


@pytest.mark.parametrize("case", RECORDED["sims"], ids=lambda case: f"{case['schedule']}-{case['setting'][:40]}")
def test_makespans_are_the_recorded_ones(case: dict[str, Any]) -> None:
    schedule, ranks, chunks = NAMES[case["schedule"]], case["ranks"], case["stages_per_rank"]
    work, link = setting_of(case["setting"], ranks)
    seconds = []
    for stage in range(ranks * chunks):
        each = work[rank_of_stage(schedule, stage, ranks=ranks)] / chunks
        seconds.append(StageSeconds(forward=each, input_gradient=each, weight_gradient=each))
    made = run(schedule, case["microbatches"], seconds, link, ranks)
    assert made.makespan == pytest.approx(case["makespan"])
    assert made.mean_idle == pytest.approx(case["mean_idle"], abs=1e-6)
    assert list(made.in_flight) == case["peak_in_flight_per_rank"]


@pytest.mark.parametrize("case", RECORDED["slow_links"], ids=lambda case: f"{case['micro_batches']}-{case['link']}")
def test_slow_links_give_the_recorded_makespans(case: dict[str, Any]) -> None:
    ranks, micro_batches = case["ranks"], case["micro_batches"]
    stage = StageSeconds(forward=case["f"], input_gradient=case["backward"] / 2, weight_gradient=case["backward"] / 2)
    link = LinkSeconds(occupied=case["link"])
    runs: dict[str, tuple[Schedule, int | None]] = {
        "gpipe": (Schedule.GPIPE, None),
        "1f1b": (Schedule.ONE_F_ONE_B, None),
        "eager 1f1b warm=2(P-1-r)": (Schedule.ONE_F_ONE_B, 2),
        "warm=3(P-1-r)": (Schedule.ONE_F_ONE_B, 3),
        "zb-h1-like": (Schedule.ZERO_BUBBLE, None),
    }
    for name, (schedule, depth) in runs.items():
        warm_up = None if depth is None else [depth * (ranks - 1 - rank) for rank in range(ranks)]
        made = run(schedule, micro_batches, [stage] * ranks, link, ranks, warm_up)
        assert [made.makespan, made.in_flight[0]] == case["results"][name], name
    bound = case["results"]["links-as-stages bound: (M-1)*max(f+b,L)+P(f+b)+2L(P-1)"]
    assert ideal_seconds([stage] * ranks, [link] * 2 * (ranks - 1), micro_batches) == bound


@given(
    schedule=st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B]),
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 20),
)
def test_equal_stages_without_links_have_the_bubble_of_the_formula(
    schedule: Schedule, ranks: int, micro_batches: int
) -> None:
    stage = StageSeconds(forward=1, input_gradient=1, weight_gradient=1)
    made = run(schedule, micro_batches, [stage] * ranks, LinkSeconds(), ranks)
    assert made.mean_idle == pytest.approx(ideal_bubble(ranks, micro_batches))
    assert made.makespan == ideal_seconds([stage] * ranks, [], micro_batches)


def test_borders_between_the_same_ranks_share_their_link() -> None:
    lists = [[forward(0, 0), forward(0, 1), forward(2, 0)], [forward(1, 0), forward(1, 1), forward(3, 0)]]
    stage = StageSeconds(forward=1, input_gradient=1, weight_gradient=1)
    links = {(0, 1): LinkSeconds(occupied=5)}
    times = [
        simulate(lists, seconds=[stage] * 4, place=lambda stage: stage % 2, links=links, link_per_border=own).makespan
        for own in (False, True)
    ]
    assert times == [17, 14], "the message of stage 2 leaves after both of stage 0, or beside the second of them"


def test_lists_that_wait_for_each_other_are_named() -> None:
    stage = StageSeconds(forward=1, input_gradient=1, weight_gradient=1)
    lists = [[forward(0, 0), backward(0, 0), forward(0, 1)], [forward(1, 0), forward(1, 1), backward(1, 0)]]
    with pytest.raises(ConfigError, match="rank 0 before 0B0, rank 1 before 1F1"):
        simulate(lists, seconds=[stage] * 2, place=lambda stage: stage)


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("micro_batches", "bubble"), [(1, 3 / 4), (2, 3 / 5), (3, 3 / 6)])
def test_fewer_micro_batches_than_stages_have_the_bubble_of_the_formula(
    schedule: Schedule, micro_batches: int, bubble: float
) -> None:
    """PRF-03"""
    assert predicted_bubble(schedule, ranks=4, stages=4, micro_batches=micro_batches) == pytest.approx(bubble)


def test_several_stages_a_rank_and_split_backwards_wait_less() -> None:
    plain = predicted_bubble(Schedule.ONE_F_ONE_B, ranks=4, stages=4, micro_batches=8)
    for schedule, stages in [(Schedule.INTERLEAVED, 8), (Schedule.ZERO_BUBBLE, 4), (Schedule.ZBV, 8)]:
        assert predicted_bubble(schedule, ranks=4, stages=stages, micro_batches=8) < plain


def test_nothing_to_do_takes_no_time() -> None:
    made = run(Schedule.GPIPE, 0, [StageSeconds(forward=1, input_gradient=1, weight_gradient=1)], LinkSeconds(), 1)
    assert (made.makespan, made.mean_idle, ideal_bubble(4, 0)) == (0, 0, 0)
