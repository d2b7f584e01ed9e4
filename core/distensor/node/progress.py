"""What a worker tells its supervisor while it trains: at most two lines a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from distensor.core import Clock

if TYPE_CHECKING:
    from distensor.node.ipc import Emitter
    from distensor.node.orders import StepOrder
    from distensor.node.replica_meter import ReplicaMeter
    from distensor.node.step_report import StepReport
    from distensor.transport import DataPlane, LinkStats

MIN_INTERVAL_SECONDS = 0.5


class ProgressReporter:
    """Collects the newest figures; sends them when the interval has passed."""

    def __init__(self, *, emitter: Emitter, clock: Clock, replicas: ReplicaMeter | None = None) -> None:
        self._emitter = emitter
        self._clock = clock
        self._plane: DataPlane | None = None
        self._sent_at = float("-inf")
        self._replicas = replicas
        self._process = psutil.Process(os.getpid())
        self._figures: dict[str, Any] = {
            "state": "waiting",
            "step": 0,
            "total_steps": None,
            "stages": [],
            "loss": None,
            "tokens_per_second": None,
            "compute_s": 0.0,
            "sync_s": 0.0,
            "wait_s": 0.0,
            "replicas": None,
        }

    def watch(
        self, plane: DataPlane, more: Callable[[], Mapping[int, LinkStats]] = lambda: dict[int, "LinkStats"]()
    ) -> None:
        """`more` are connections beside those of the plane."""
        self._plane, self._more = plane, more

    def loading(self) -> None:
        self._figures["state"] = "loading"
        self._send(now=True)

    def loaded(self, stages: Sequence[int], how: str = "", elements: int = 0) -> None:
        """`how` replicas agree, and the elements of this rank's gradients."""
        if self._replicas is not None:
            self._replicas.begin(how, elements)
        self._figures.update(state="waiting", stages=list(stages))
        self._send(now=True)

    def step(self, order: StepOrder, report: StepReport) -> None:
        self._figures.update(
            state="training",
            step=order.step,
            total_steps=order.total_steps,
            loss=report.loss,
            tokens_per_second=order.tokens_per_second,
            compute_s=report.compute_seconds,
            sync_s=report.sync_seconds,
            wait_s=report.wait_seconds,
            replicas=None if self._replicas is None else self._replicas.step(self.links()),
        )
        self._send(now=order.step == order.total_steps)

    def worked(self) -> None:
        """The command before is done: the supervisor ends workers that give no sign of work for very long."""
        self._send(now=False)

    def _send(self, *, now: bool) -> None:
        moment = self._clock.monotonic()
        if not now and moment - self._sent_at < MIN_INTERVAL_SECONDS:
            return
        self._sent_at = moment
        rss = self._process.memory_info().rss
        self._emitter.emit("progress", **self._figures, links=self.links(), rss=rss)

    def links(self) -> list[dict[str, Any]]:
        """Bytes so far to and from each peer, as counted on the sockets; the round trip and how old it is; by which way
        the peer is reached, and at how many bytes a second its last large message came."""
        if self._plane is None:
            return []
        now = self._clock.monotonic()
        return [
            {
                "peer": peer,
                "sent": stats.bytes_sent,
                "received": stats.bytes_received,
                "rtt_ms": None if stats.rtt_seconds is None else round(1000 * stats.rtt_seconds, 3),
                "rtt_age_s": None if stats.rtt_at is None else round(max(0.0, now - stats.rtt_at), 1),
                "path": stats.path,
                "line_rate": None if stats.receive_rate is None else round(stats.receive_rate),
            }
            for peer, stats in sorted({**self._plane.stats(), **self._more()}.items())
        ]
