"""The seam to the hub: what the supervisor needs of a link, and how it gets the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from distensor.comm import LinkStatus, NodeLink, NodeLinkHandler
from distensor.core.clock import Clock
from distensor.core.control import NodeInfo, Unit, WorkerChange, WorkerReady
from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery


class HubLink(Protocol):
    """`distensor.comm.NodeLink` is the real one."""

    @property
    def status(self) -> LinkStatus: ...

    @property
    def unanswered_claims(self) -> int: ...

    async def run(self) -> None: ...

    def report(self, report: WorkerReady | WorkerChange) -> None: ...

    def claim(self, unit: Unit) -> None: ...

    def set_accepting(self, accepting: bool) -> None: ...

    def wake(self) -> None: ...

    async def statement(self, query: StatementQuery) -> Statement: ...

    async def units(self, query: UnitsQuery) -> UnitsPage: ...

    def use_token(self, token: str | None) -> None: ...


class LinkFactory(Protocol):
    """Makes the link. The arguments are those of `NodeLink` without the token, which stays with who read it."""

    def __call__(
        self,
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[tuple[JobId, Epoch, Rank]]],
        handler: NodeLinkHandler,
        clock: Clock,
    ) -> HubLink: ...


def link_with(token: str | None) -> LinkFactory:
    """The real link, with `token` for the first time that this node joins."""

    def make(
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[tuple[JobId, Epoch, Rank]]],
        handler: NodeLinkHandler,
        clock: Clock,
    ) -> HubLink:
        return NodeLink(token, credential_path, describe, running, handler, clock)

    return make
