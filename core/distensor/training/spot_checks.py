"""Spot checks: now and then other workers compute a random unit too, and what they find is compared. Pure.

A unit is what one rank computes in one step. All ranks say in every step what they computed (a sketch of their own
gradients, `node/sketch.py`), before anybody could know which unit was chosen. Up to two other replicas, the witnesses,
which hold the same weights, are given the batch of the chosen one and compute it as well.

    target  = some witness               matched
    target != both witnesses, which agree    different: the target's units are held
    target != the only witness, or all three differ    disputed: nobody can tell who is wrong, nobody is held
    witness != target = the other witness    matched, and the witness is named
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from distensor.core.errors import ConfigError

Sketch: TypeAlias = Mapping[str, tuple[float, float]]
"""(product, norm) of each gradient, by "stage/name"."""

MOST_WITNESSES = 2
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
"""Of the gradient's norm, by the precision of the job: what honest machines of different kinds may differ by."""

SMALL = 0.05
"""Some gradients are 0 but for rounding, such as that of an attention's key bias: of those, honest machines of
different kinds agree in nothing. So what is smaller than this part of the whole gradient is measured by the whole."""


class Outcome(StrEnum):
    MATCHED = "matched"
    DIFFERENT = "different"
    DISPUTED = "disputed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """Ranks: whose unit it is, and who computes it too."""

    target: int
    witnesses: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What came of a check. `difference` is the largest between target and a witness, as a part of the norm."""

    outcome: Outcome
    difference: float
    liars: tuple[int, ...] = ()
    """Witnesses that differ from the target and from the other witness, which agree."""


class Draw(Protocol):
    """`random.SystemRandom`, which nobody foretells; tests bring their own."""

    def random(self) -> float: ...

    def sample(self, population: Sequence[int], k: int) -> list[int]: ...


DEFAULT_RATE = 0.01


def check_rate(value: object) -> float:
    """Raises ConfigError for what is no share of units."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"spot_checks={value!r}: expected a share of the units, from 0 (none) to 1")
    return float(value)


def choose(rate: float, working: Sequence[int], draw: Draw) -> Check | None:
    """The check of one step among the ranks that work in it: each unit is chosen with probability `rate`, at most one
    a step. None: no check."""
    if len(working) < 2 or draw.random() >= rate * len(working):
        return None
    target, *witnesses = draw.sample(working, min(len(working), 1 + MOST_WITNESSES))
    return Check(target=target, witnesses=tuple(witnesses))


def judge(said: Sketch | None, seen: Mapping[int, Sketch | None], tolerance: float) -> Finding:
    """What follows from what the target said, and from what each witness found."""
    apart = {witness: difference(said, sketch) for witness, sketch in seen.items()}
    largest = max(apart.values())
    against = tuple(witness for witness, each in apart.items() if each > tolerance)
    if len(against) < len(apart):
        return Finding(outcome=Outcome.MATCHED, difference=largest, liars=against)
    sketches = list(seen.values())
    agree = len(sketches) > 1 and all(difference(sketches[0], other) <= tolerance for other in sketches[1:])
    return Finding(outcome=Outcome.DIFFERENT if agree else Outcome.DISPUTED, difference=largest)


def doubted(finding: Finding) -> Finding:
    """The same of a model that draws random numbers, which other kinds of machines draw otherwise."""
    outcome = Outcome.DISPUTED if finding.outcome is Outcome.DIFFERENT else finding.outcome
    return replace(finding, outcome=outcome, liars=())


def difference(one: Sketch | None, other: Sketch | None) -> float:
    """The largest difference of a number of the two, as a part of the larger norm of that gradient, or of SMALL of the
    norm of all where that is more; infinite where they are not of the same tensors."""
    if one is None or other is None or one.keys() != other.keys():
        return math.inf
    least = SMALL * max(_whole(one), _whole(other))
    return max((_apart(one[key], other[key], least) for key in one), default=0.0)


def _whole(sketch: Sketch) -> float:
    """The norm of all gradients together."""
    return math.hypot(*(norm for _, norm in sketch.values()))


def _apart(one: tuple[float, float], other: tuple[float, float], least: float) -> float:
    size = max(abs(one[1]), abs(other[1]), least)
    apart = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    if apart == 0:
        return 0.0
    return apart / size if size > 0 and math.isfinite(apart) else math.inf


def read_sketch(words: Any) -> Sketch | None:
    """What a rank says; None where that is no sketch, which equals none."""
    if not isinstance(words, dict) or len(words) > 1 << 20:
        return None
    pairs = words.values()
    if not all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs):
        return None
    return {str(key): (float(pair[0]), float(pair[1])) for key, pair in words.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
