"""What the simulation predicts is what the workers take: stages that sleep, links that delay."""

from __future__ import annotations

import pytest
from node_kit import planes_of
from sleeping_kit import Case, measured, pieces_of

from distensor.core.pipeline_simulation import LinkSeconds, StageSeconds, ideal_bubble
from distensor.core.schedules import Schedule

TRIES = 20
"""The quickest counts: on a busy machine a thread may wake late."""


def stage(unit: float) -> StageSeconds:
    return StageSeconds(forward=unit, input_gradient=unit, weight_gradient=unit)


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_few_micro_batches_take_what_the_formula_says(schedule: Schedule) -> None:
    """PRF-03: 4 ranks with 1, 2 and 3 micro-batches, within 30 % of what was predicted."""
    pieces = pieces_of(4)
    with planes_of(4) as planes:
        for sequence, micro_batches in enumerate((1, 2, 3), 1):
            case = Case(schedule=schedule, ranks=4, micro_batches=micro_batches, seconds=[stage(0.03)] * 4)
            predicted = micro_batches * 0.09 / (1 - ideal_bubble(4, micro_batches))
            assert case.simulated().makespan == pytest.approx(predicted)
            times = []
            for attempt in range(TRIES):
                times.append(measured(case, planes, pieces, 10 * sequence + attempt)[0])
                if times[-1] < 1.3 * predicted:
                    break
            assert predicted <= min(times) * 1.01, "a sleep is never shorter"
            assert min(times) < 1.3 * predicted


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("latency", [0, 0.2])
def test_every_schedule_takes_what_is_predicted(schedule: Schedule, latency: float) -> None:
    stages = 8 if schedule in (Schedule.INTERLEAVED, Schedule.ZBV) else 4
    case = Case(
        schedule=schedule, ranks=4, micro_batches=8, seconds=[stage(0.1)] * stages, link=LinkSeconds(latency=latency)
    )
    with planes_of(4) as planes:
        took, held = measured(case, planes, pieces_of(stages), 1)
    predicted = case.simulated()
    assert list(predicted.in_flight) == held
    assert predicted.makespan <= took * 1.01
    assert took < 1.3 * predicted.makespan
