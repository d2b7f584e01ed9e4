"""What a feature of the supervisor may contribute. It overrides what it needs; everything else stays nothing.

A feature is made once, by a `FeatureFactory` (node.py) that gets the `Node`. All of its methods are called in the event
loop of the supervisor and must not block; an exception in one is a bug and ends the supervisor in order.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from distensor.core.control import Assignment, Earnings, Unit
from distensor_server.config import Limits
from distensor_server.localserver import Method
from distensor_server.picture import Gate, LoggedEvent, Picture
from distensor_server.sections import Section

SectionBuilder: TypeAlias = Callable[[Picture], Section]


class Feature:
    """Base of all features."""

    def sections(self) -> Mapping[str, SectionBuilder]:
        """More sections of the local protocol. Asked once; the builders run at most four times a second."""
        return {}

    def methods(self) -> Mapping[str, Method]:
        """More methods of the local protocol; a RequestError is answered with ok=false. Asked once."""
        return {}

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs as long as the node serves; cancelled at its end. One that returns ends the supervisor."""
        return ()

    def open(self) -> None:
        """Once, when the state directory is ours and nothing runs yet: the moment to read what was kept."""

    def close(self) -> None:
        """Once, when every worker is gone and the state directory is still ours."""

    def refusal(self, assignment: Assignment | None) -> str | None:
        """Why no new work is taken now; for `assignment`, or in general. `Node.reconsider` tells when it changed."""
        return None

    def gates(self) -> Sequence[Gate]:
        """More conditions of work for `why`, open and closed ones."""
        return ()

    def on_tick(self, picture: Picture) -> None:
        """Every two seconds, with fresh readings of the machine."""

    def on_event(self, event: LoggedEvent) -> None:
        """An event was shown. It may not make another one."""

    def on_clock_set(self, by: float) -> None:
        """Wall time jumped by so many seconds; what was counted from `clock.now()` may be moved along."""

    def on_woken(self) -> None:
        """The machine slept, or this process was stopped for a while."""

    def on_limits(self, limits: Limits) -> None:
        """The settings were read again."""

    def on_process_started(self, pid: int) -> None:
        """A worker's process is there; it leads a process group of its own."""

    def on_process_ended(self, pid: int) -> None:
        """That process is gone, and its group with it."""

    def on_claim(self, assignment: Assignment, unit: Unit) -> None:
        """A worker claimed a unit."""

    def on_earnings(self, earnings: Earnings) -> None:
        """The hub said what it has confirmed."""


class Features:
    """All features of one node as one."""

    def __init__(self) -> None:
        self._all: list[Feature] = []

    def add(self, feature: Feature) -> None:
        self._all.append(feature)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._all)

    def section_builders(self) -> dict[str, SectionBuilder]:
        return _merged([feature.sections() for feature in self._all])

    def all_methods(self) -> dict[str, Method]:
        return _merged([feature.methods() for feature in self._all])

    def refusal(self, assignment: Assignment | None) -> str | None:
        """The first reason."""
        return next((reason for feature in self._all if (reason := feature.refusal(assignment)) is not None), None)

    def gates(self) -> tuple[Gate, ...]:
        return tuple(gate for feature in self._all for gate in feature.gates())


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        assert not twice, f"two features give {', '.join(sorted(twice))}"
        merged.update(part)
    return merged
