"""What the owner says: pause, resume, drain, reset_breaker; the wish is kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distensor.core.control import Assignment
from distensor_server.feature import Feature
from distensor_server.holds import is_over, load_hold, parse_drain, parse_pause, save_hold
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.picture import Hold, HoldKind, Picture

PAUSE_DRAIN_SECONDS = 10.0


class OwnersWish(Feature):
    """Sets `node.hold`, and ends it at its time."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def open(self) -> None:
        self._node.hold = load_hold(self._node.state.hold, self._node.clock.now())

    def methods(self) -> Mapping[str, Method]:
        return {
            "pause": self._on_pause,
            "resume": self._on_resume,
            "drain": self._on_drain,
            "reset_breaker": self._on_reset_breaker,
        }

    def refusal(self, assignment: Assignment | None) -> str | None:
        hold = self._node.hold
        return None if hold is None else f"the owner asked for {hold.kind.value}"

    def on_tick(self, picture: Picture) -> None:
        if self._node.hold is not None and is_over(self._node.hold, picture.now):
            self._set_hold(None, "the pause is over")

    def on_clock_set(self, by: float) -> None:
        hold = self._node.hold
        if hold is not None and hold.lasts and hold.until is not None:
            moved = replace(hold, until=hold.until + by)
            self._node.hold = moved
            self._node.journal.guarded(lambda: save_hold(self._node.state.hold, moved))

    def _on_pause(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        hold = parse_pause(params, self._node.clock.now())
        self._set_hold(hold, "paused by the owner")
        self._node.workforce.drain_all(PAUSE_DRAIN_SECONDS, "paused by the owner")
        return {"until": hold.until}

    def _on_drain(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        seconds = parse_drain(params, self._node.limits.drain_seconds)
        self._set_hold(Hold(kind=HoldKind.DRAIN), "drained by the owner")
        self._node.workforce.drain_all(seconds, "drained by the owner")
        return {"seconds": seconds}

    def _on_resume(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if params:
            raise RequestError(code="bad_params", message="resume takes no parameters")
        self._set_hold(None, "resumed by the owner")
        return {}

    def _on_reset_breaker(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        name = params.get("worker")
        if params.keys() - {"worker"} or not isinstance(name, str | None):
            raise RequestError(code="bad_params", message="reset_breaker takes {} or {'worker': id}")
        return {"reset": self._node.workforce.reset_breakers(name)}

    def _set_hold(self, hold: Hold | None, text: str) -> None:
        if hold == self._node.hold:
            return
        self._node.hold = hold
        self._node.journal.guarded(lambda: save_hold(self._node.state.hold, hold))
        self._node.reconsider()
        self._node.journal.add("info", "owner", text)
