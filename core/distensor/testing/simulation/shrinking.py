"""From a run that fails to the least of it that still does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distensor.testing.simulation.world import Outcome, Settings, run


def shrunk(failed: Outcome, *, runs: int = 60, run: Callable[[Settings], Outcome] = run) -> Outcome:
    """The same broken promise with as few faults as `runs` further runs find, and no event after it.

    Halves are left out first, then single faults; what is left fails with each of them, as far as was tried.
    """
    assert failed.violation is not None, "nothing to shrink: the run kept every promise"
    promise = failed.violation.promise
    best, numbers = failed, [fault.number for fault in failed.faults if fault.at <= failed.seconds]
    size = len(numbers)
    while size >= 1 and runs > 0:
        start = 0
        while start < len(numbers) and runs > 0:
            fewer = numbers[:start] + numbers[start + size :]
            runs -= 1
            outcome = run(replace(failed.settings, faults=tuple(fewer), steps=None))
            if outcome.violation is not None and outcome.violation.promise is promise:
                best, numbers = outcome, [n for n in fewer if n in _met(outcome)]
            else:
                start += size
        size //= 2
    return best


def _met(outcome: Outcome) -> set[int]:
    return {fault.number for fault in outcome.faults if fault.at <= outcome.seconds}
