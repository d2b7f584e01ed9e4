"""The node's own account as a feature of the supervisor, loaded once that is ready, because it costs 20 ms."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distensor.core.control import Assignment, Earnings, Unit
from distensor_server.config import Limits
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.sections import Section

if TYPE_CHECKING:
    from distensor_server.income.keeper import Keeper


class Income(Feature):
    """Hands everything on to a `Keeper` once there is one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.keeper: Keeper | None = None

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._keep(),)

    async def _keep(self) -> None:
        """No worker has claimed anything before this runs: it is among the first things of the event loop."""
        from distensor_server.income.keeper import Keeper

        self.keeper = Keeper(self._node)
        self.keeper.open()
        await self.keeper.keep_comparing()

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"income": self._section}

    def _section(self, _picture: Picture) -> Section:
        return None if self.keeper is None else self.keeper.section

    def methods(self) -> Mapping[str, Method]:
        return {
            "statement": lambda params: self._loaded().statement(params),
            "units": lambda params: self._loaded().units(params),
        }

    def _loaded(self) -> Keeper:
        if self.keeper is None:
            raise RequestError(code="starting", message="the account is being opened", fix="ask again in a second")
        return self.keeper

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()

    def on_claim(self, assignment: Assignment, unit: Unit) -> None:
        if self.keeper is not None:
            self.keeper.on_claim(assignment, unit)

    def on_earnings(self, earnings: Earnings) -> None:
        if self.keeper is not None:
            self.keeper.on_earnings(earnings)

    def on_limits(self, limits: Limits) -> None:
        if self.keeper is not None:
            self.keeper.on_limits(limits)

    def on_woken(self) -> None:
        if self.keeper is not None:
            self.keeper.on_woken()

    def on_clock_set(self, by: float) -> None:
        if self.keeper is not None:
            self.keeper.on_clock_set(by)

    def on_tick(self, picture: Picture) -> None:
        if self.keeper is not None:
            self.keeper.on_tick(picture)
