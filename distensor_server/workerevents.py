"""What the workers say, and what this node does about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from distensor.core.control import Assignment, Unit, UnitKey, WorkerChange, WorkerReady
from distensor.core.ids import Epoch, Rank
from distensor_server.books import Books
from distensor_server.claims import ClaimBacklog
from distensor_server.feature import Features
from distensor_server.hublink import HubLink
from distensor_server.journal import Journal
from distensor_server.messages import Claim
from distensor_server.orphans import WorkerRegistry
from distensor_server.workforce import Workforce


class _Node(Protocol):
    """What is needed of `node.Node`, which makes this."""

    link: HubLink
    journal: Journal
    workforce: Workforce
    books: Books
    features: Features
    claims: ClaimBacklog
    on_change: Callable[[], None]


class WorkerEvents:
    """The owner of every worker (`worker.WorkerOwner`)."""

    def __init__(self, node: _Node, registry: WorkerRegistry) -> None:
        self._node = node
        self._registry = registry

    def on_report(self, report: WorkerReady | WorkerChange) -> None:
        self._node.link.report(report)

    def on_claim(self, assignment: Assignment, claim: Claim) -> None:
        epoch = assignment.epoch if claim.epoch is None else min(Epoch(claim.epoch), assignment.epoch)
        rank = assignment.rank if claim.rank is None else Rank(claim.rank)
        key = UnitKey(job_id=assignment.job_id, epoch=epoch, step=claim.step, rank=rank)
        unit = Unit(key=key, micro_batches=claim.micro_batches)
        kept = self._node.journal.guarded(lambda: self._node.books.claimed(unit))
        self._node.claims.admit(unit, kept=kept)
        self._node.workforce.claimed(unit)
        self._node.features.tell("on_claim", lambda feature: feature.on_claim(assignment, unit))
        self._node.on_change()

    def on_process(self, *, started: int | None = None, ended: int | None = None) -> None:
        if started is not None:
            self._node.journal.guarded(lambda: self._registry.add(started))
            self._node.features.tell("on_process_started", lambda feature: feature.on_process_started(started))
        if ended is not None:
            self._node.journal.guarded(lambda: self._registry.discard(ended))
            self._node.features.tell("on_process_ended", lambda feature: feature.on_process_ended(ended))

    def on_event(self, severity: str, source: str, text: str) -> None:
        self._node.journal.add(severity, source, text)

    def on_change(self) -> None:
        self._node.on_change()
