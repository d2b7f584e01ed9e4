"""The spot checks of one job: chosen, judged, counted, told."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distensor.core.control import Unit, UnitKey
from distensor.core.numbers import is_finite
from distensor.training.spot_checks import Check, Draw, Finding, Outcome, choose, doubted, judge, read_sketch

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.training.replies import Reply

logger = logging.getLogger(__name__)

REMEMBERED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A unit that others computed too. `who` is its rank and node, `liars` are witnesses that were found wrong."""

    unit: UnitKey
    who: str
    finding: Finding
    liars: tuple[str, ...]


class SpotChecks:
    """Counts what was found.

    `alike`: machines of all kinds compute the same; where a model draws random numbers they do not, and nobody is
    called a cheat. `bytes` and `seconds` are what the checks cost: batches that were sent once more, and the time of
    the slowest witness of each, for which all others waited.
    """

    def __init__(
        self,
        rate: float,
        tolerance: float,
        object_to: Callable[[Unit], None] = lambda _unit: None,
        draw: Draw | None = None,
        alike: bool = True,
    ) -> None:
        self.rate = rate
        self.counts: Counter[Outcome] = Counter()
        self.largest = 0.0
        """The largest difference of those that matched."""
        self.newest: deque[Checked] = deque(maxlen=REMEMBERED)
        """Those that did not match, or that showed a witness to be wrong."""
        self.bytes = 0
        self.seconds = 0.0
        self._tolerance = tolerance
        self._object_to = object_to
        self._draw: Draw = draw or random.SystemRandom()
        self._alike = alike

    @property
    def on(self) -> bool:
        """Whether ranks are to say what they computed."""
        return self.rate > 0

    def choose(self, working: Sequence[int]) -> Check | None:
        """The check of the next step, among the ranks that work in it."""
        return choose(self.rate, working, self._draw) if self.on else None

    def conclude(
        self, check: Check, unit: Unit, replies: Sequence[Reply], batch: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """The answers of all ranks to the step of the check. Where `unit` is different, the hub is told."""
        by_rank = {reply.rank: reply for reply in replies}
        witnessed = {rank: words for rank in check.witnesses if (words := _witnessed(by_rank[rank])) is not None}
        if not witnessed:  # none of them had all weights yet
            return
        said = read_sketch(by_rank[check.target].meta.get("sketch"))
        seen = {rank: read_sketch(words.get("sketch")) for rank, words in witnessed.items()}
        finding = judge(said, seen, self._tolerance)
        if not self._alike:
            finding = doubted(finding)
        self.counts[finding.outcome] += 1
        self.bytes += len(check.witnesses) * sum(tensor.nbytes for part in batch for tensor in part.values())
        self.seconds += max(_seconds(words) for words in witnessed.values())
        who = by_rank[check.target].who
        checked = Checked(
            unit=unit.key, who=who, finding=finding, liars=tuple(by_rank[rank].who for rank in finding.liars)
        )
        self._note(checked, [by_rank[rank].who for rank in seen])
        if finding.outcome is Outcome.DIFFERENT:
            self._object_to(unit)

    def _note(self, checked: Checked, witnesses: Sequence[str]) -> None:
        finding, step = checked.finding, checked.unit.step
        if finding.outcome is Outcome.MATCHED and not finding.liars:
            self.largest = max(self.largest, finding.difference)
            return
        self.newest.append(checked)
        others = " and ".join(witnesses)
        match finding.outcome:
            case Outcome.MATCHED:
                logger.warning("step %d: %s computed another unit wrong", step, " and ".join(checked.liars))
            case Outcome.DIFFERENT:
                logger.warning("step %d: %s did not compute what %s did", step, checked.who, others)
            case Outcome.DISPUTED:
                logger.warning("step %d: %s and %s differ; nobody can tell who is wrong", step, checked.who, others)


def _witnessed(reply: Reply) -> Mapping[str, Any] | None:
    """None from one who could not know."""
    words = reply.meta.get("witnessed")
    return None if words is None else words if isinstance(words, dict) else {}


def _seconds(words: Mapping[str, Any]) -> float:
    value = words.get("seconds")
    return float(value) if is_finite(value) and 0 <= value < 1e9 else 0.0
