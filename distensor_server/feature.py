"""What a feature of the supervisor may contribute. It overrides what it needs; everything else stays nothing.

A feature is made once, by a `FeatureFactory` (node.py) that gets the `Node`. All of its methods are called in the event
loop of the supervisor and must not block. An exception in one is a bug: it is logged with its traceback and shown as an
event, and everything else goes on: a worker must not die of a bug in a page of figures. Only what decides over new
work fails closed: no refusal that cannot be asked counts as consent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from distensor.core.clock import Clock
from distensor.core.control import Assignment, DeviceInfo, Earnings, Unit
from distensor.core.errors import DistensorError
from distensor_server.config import Limits
from distensor_server.localserver import Method
from distensor_server.picture import Gate, LoggedEvent, Picture
from distensor_server.sections import Section

log = logging.getLogger("distensor_server")

AGAIN_SECONDS = 10.0

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
        """What runs as long as the node serves; cancelled at its end. After an exception all are asked for again."""
        return ()

    def open(self) -> None:
        """Once, when the state directory is ours and nothing runs yet: the moment to read what was kept.

        A DistensorError is no bug but a reason not to start, and passes on.
        """

    def close(self) -> None:
        """Once, when every worker is gone and the state directory is still ours."""

    def refusal(self, assignment: Assignment | None) -> str | None:
        """Why no new work is taken now; for `assignment`, or in general. `Node.reconsider` tells when it changed."""
        return None

    def offer(self, info: DeviceInfo) -> DeviceInfo:
        """What of a device is offered to the hub."""
        return info

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
    """All features of one node as one. `on_bug` is told what failed, in words."""

    def __init__(self, on_bug: Callable[[str], None]) -> None:
        self._all: list[Feature] = []
        self._on_bug = on_bug
        self._telling = False
        self.bugs: list[str] = []
        """The newest of what failed; a test that leaves any has found a bug."""

    def add(self, feature: Feature) -> None:
        self._all.append(feature)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._all)

    def open(self) -> None:
        """Raises DistensorError where a feature cannot let the node start."""
        for feature in self._all:
            try:
                feature.open()
            except DistensorError:
                raise
            except Exception as error:  # noqa: BLE001 - see the head of this file
                self._failed(feature, "open", error)

    def tell(self, hook: str, call: Callable[[Feature], None]) -> None:
        """Make `call` with every feature; `hook` names it for the log."""
        for feature in self._all:
            try:
                call(feature)
            except Exception as error:  # noqa: BLE001 - see the head of this file
                self._failed(feature, hook, error)

    def section_builders(self) -> dict[str, SectionBuilder]:
        return _merged([{name: self._safe(f, build) for name, build in f.sections().items()} for f in self._all])

    def all_methods(self) -> dict[str, Method]:
        return _merged([feature.methods() for feature in self._all])

    def refusal(self, assignment: Assignment | None) -> str | None:
        """The first reason."""
        for feature in self._all:
            try:
                reason = feature.refusal(assignment)
            except Exception as error:  # noqa: BLE001 - see the head of this file
                reason = self._failed(feature, "refusal", error)
            if reason is not None:
                return reason
        return None

    def offer(self, info: DeviceInfo) -> DeviceInfo:
        for feature in self._all:
            try:
                info = feature.offer(info)
            except Exception as error:  # noqa: BLE001 - see the head of this file
                info = replace(info, slots=0, unusable=self._failed(feature, "offer", error))
        return info

    def gates(self) -> tuple[Gate, ...]:
        gates: list[Gate] = []
        for feature in self._all:
            try:
                gates += feature.gates()
            except Exception as error:  # noqa: BLE001 - see the head of this file
                name = type(feature).__name__.lower()
                gates.append(Gate(gate=name, open=False, reading=self._failed(feature, "gates", error)))
        return tuple(gates)

    async def background(self, clock: Clock) -> None:
        """Run what all have in the background, for ever."""
        async with asyncio.TaskGroup() as group:
            for feature in self._all:
                group.create_task(self._keep_up(feature, clock))
            await asyncio.get_running_loop().create_future()

    async def _keep_up(self, feature: Feature, clock: Clock) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    for coroutine in feature.background():
                        group.create_task(coroutine)
                return
            except Exception as error:  # noqa: BLE001 - see the head of this file
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                self._failed(feature, "background", first)
            await clock.sleep_async(AGAIN_SECONDS)

    def _safe(self, feature: Feature, build: SectionBuilder) -> SectionBuilder:
        def built(picture: Picture) -> Section:
            try:
                return build(picture)
            except Exception as error:  # noqa: BLE001 - see the head of this file
                return {"error": self._failed(feature, "sections", error)}

        return built

    def _failed(self, feature: Feature, hook: str, error: Exception) -> str:
        words = f"{type(feature).__name__} failed in {hook}: {type(error).__name__}: {error}"[:300]
        if words not in self.bugs:
            self.bugs = [*self.bugs[-9:], words]
            log.error("a bug: %s", words, exc_info=error)
        if not self._telling:  # a feature that fails on every event must not make events of that for ever
            self._telling = True
            try:
                self._on_bug(words)
            finally:
                self._telling = False
        return words


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        assert not twice, f"two features give {', '.join(sorted(twice))}"
        merged.update(part)
    return merged
