"""Bytes per second of each link, from counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from distensor_server.messages import LinkBytes

WINDOW_SECONDS = 2.0
STALE_SECONDS = 5.0
"""A worker reports at least twice a second; one that is silent for so long has no rate, rather than an old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """Counters and rates of the link to `peer`; a rate or round trip is None while it is not known."""

    peer: int
    sent: int
    received: int
    sent_rate: float | None
    received_rate: float | None
    rtt_ms: float | None = None
    rtt_age_s: float | None = None
    """How long ago the round trip was measured."""
    path: str | None = None
    line_rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    at: float
    sent: int
    received: int
    rtt_ms: float | None
    rtt_at: float | None
    path: str | None
    line_rate: float | None


class LinkMeter:
    """The links of one worker process. A counter that went back belongs to a new process: its past is dropped."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: dict[int, deque[_Sample]] = {}

    def update(self, links: Iterable[LinkBytes], now: float) -> None:
        for link in links:
            self._add(link, now)

    def _add(self, link: LinkBytes, now: float) -> None:
        samples = self._samples.setdefault(link.peer, deque())
        if samples and (link.sent < samples[-1].sent or link.received < samples[-1].received):
            samples.clear()
        measured = None if link.rtt_age_s is None else now - link.rtt_age_s
        samples.append(
            _Sample(
                at=now,
                sent=link.sent,
                received=link.received,
                rtt_ms=link.rtt_ms,
                rtt_at=measured,
                path=link.path,
                line_rate=link.line_rate,
            )
        )
        # The newest sample that is at least a window old stays as the base of the rate.
        while len(samples) > 2 and now - samples[1].at >= WINDOW_SECONDS:
            samples.popleft()

    def rates(self, now: float) -> tuple[LinkRate, ...]:
        return tuple(_rate(peer, self._samples[peer], now) for peer in sorted(self._samples))


def _rate(peer: int, samples: deque[_Sample], now: float) -> LinkRate:
    first, last = samples[0], samples[-1]
    span = last.at - first.at
    known = span > 0 and now - last.at < STALE_SECONDS
    return LinkRate(
        peer=peer,
        sent=last.sent,
        received=last.received,
        sent_rate=(last.sent - first.sent) / span if known else None,
        received_rate=(last.received - first.received) / span if known else None,
        rtt_ms=last.rtt_ms,
        rtt_age_s=None if last.rtt_at is None else max(0.0, now - last.rtt_at),
        path=last.path,
        line_rate=last.line_rate,
    )
