"""Pipeline schedules over links of several speeds: predicted and real time of a step, beside the ideal formula.

Real means the worker's executor and data plane, four ranks as threads of this process, with stages that sleep instead
of computing and links that delay. Times are in units of one forward; a backward is two. Prints Markdown tables.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "node"), str(TESTS / "transport")]

from node_kit import planes_of  # noqa: E402 - the kits of the tests are found by path
from sleeping_kit import Case, measured, pieces_of  # noqa: E402

from distensor.core.pipeline_simulation import LinkSeconds, StageSeconds, ideal_seconds  # noqa: E402
from distensor.core.schedules import Schedule, takes_warm_up  # noqa: E402
from distensor.core.warm_up import Border, choose_warm_up  # noqa: E402

RANKS = 4
MICRO_BATCHES = 16
UNIT = 0.05
STAGE = StageSeconds(forward=UNIT, input_gradient=UNIT, weight_gradient=UNIT)
LINKS = {
    "none": LinkSeconds(),
    "latency 0.5": LinkSeconds(latency=0.5 * UNIT),
    "latency 2": LinkSeconds(latency=2 * UNIT),
    "busy 2": LinkSeconds(occupied=2 * UNIT),
}
"""Per message and direction; a busy link carries one message at a time."""
SAMPLES = 300


def cases(link: LinkSeconds) -> dict[str, Case]:
    found = {}
    for schedule in Schedule:
        chunks = 2 if schedule in (Schedule.INTERLEAVED, Schedule.ZBV, Schedule.LOOPED_BFS) else 1
        half = StageSeconds(
            forward=STAGE.forward / chunks,
            input_gradient=STAGE.input_gradient / chunks,
            weight_gradient=STAGE.weight_gradient / chunks,
        )
        case = Case(
            schedule=schedule, ranks=RANKS, micro_batches=MICRO_BATCHES, seconds=[half] * (RANKS * chunks), link=link
        )
        found[f"{schedule}, {chunks} stages a rank" if chunks > 1 else str(schedule)] = case
        if takes_warm_up(schedule, ranks=RANKS, stages=len(case.seconds)):
            chosen = choose_warm_up(
                seconds=case.seconds, borders=[Border(down=link, up=link)] * (RANKS - 1), micro_batches=MICRO_BATCHES
            )
            name = f"{schedule}, warm-up {'-'.join(map(str, chosen.depths))}"
            found[name] = Case(
                schedule=schedule, ranks=RANKS, micro_batches=MICRO_BATCHES, seconds=case.seconds, link=link,
                warm_up=chosen.depths,
            )  # fmt: skip
    return found


def real_against_predicted() -> None:
    print(f"{RANKS} ranks, {MICRO_BATCHES} micro-batches, times in forwards of {UNIT:g} s\n")
    print("| link each way | schedule | predicted | real | real/predicted | predicted/ideal | in flight, per rank |")
    print("|---|---|---|---|---|---|---|")
    pieces = {stages: pieces_of(stages) for stages in (RANKS, 2 * RANKS)}
    with planes_of(RANKS) as planes:
        sequence = 0
        for words, link in LINKS.items():
            ideal = ideal_seconds([STAGE] * RANKS, [link] * 2 * (RANKS - 1), MICRO_BATCHES)
            for name, case in cases(link).items():
                sequence += 1
                predicted = case.simulated()
                took, held = measured(case, planes, pieces[len(case.seconds)], sequence)
                assert list(predicted.in_flight) == held, "the executor holds what the schedule says"
                print(
                    f"| {words} | {name} | {predicted.makespan / UNIT:.1f} | {took / UNIT:.1f} | "
                    f"{took / predicted.makespan:.2f} | {predicted.makespan / ideal:.2f} | {' '.join(map(str, held))} |"
                )


def unequal_pipelines() -> None:
    source = random.Random(11)
    plain, chosen = [], []
    for _ in range(SAMPLES):
        ranks, micro_batches = source.randint(2, 8), source.choice([8, 16, 32, 64])
        seconds = [
            StageSeconds(forward=each, input_gradient=each, weight_gradient=each)
            for each in (source.uniform(0.5, 2) for _ in range(ranks))
        ]
        longest = source.choice([0.3, 1, 1.5]) * sum(each.period for each in seconds) / ranks
        borders = [Border(down=_link(source, longest), up=_link(source, longest)) for _ in range(ranks - 1)]
        made = choose_warm_up(seconds=seconds, borders=borders, micro_batches=micro_batches)
        plain.append(made.plain_seconds / made.ideal_seconds)
        chosen.append(made.seconds / made.ideal_seconds)
    print(f"\n{SAMPLES} random pipelines (2 to 8 ranks, stages 1:4, links up to 1.5 periods): time over the ideal\n")
    print("| 1F1B | median | 90th percentile | worst |")
    print("|---|---|---|---|")
    for name, ratios in (("plain", sorted(plain)), ("warm-up chosen", sorted(chosen))):
        middle, late = ratios[len(ratios) // 2], ratios[int(0.9 * len(ratios))]
        print(f"| {name} | {middle:.3f} | {late:.3f} | {ratios[-1]:.3f} |")


def _link(source: random.Random, longest: float) -> LinkSeconds:
    seconds, share = source.uniform(0, longest), source.random()
    return LinkSeconds(latency=seconds * share, occupied=seconds * (1 - share))


if __name__ == "__main__":
    real_against_predicted()
    unequal_pipelines()
