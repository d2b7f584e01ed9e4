"""How long a message to a neighbour in the pipeline takes, measured without clocks that agree.

One side sends a small message and one of the size in question, the other answers each with a small one. Half of the
small round trip is the latency of the link; what the large one takes longer is the time that the link is busy with it,
packing and encryption included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distensor.core import DRIVER_RANK
from distensor.core.clock import Clock
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.transport import Channel, DataPlane, Tag

SMALL_ROUNDS = 3
"""The shortest of so many small round trips counts: a longer one has waited for something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The ranks of the previous and the next stage, where there are any."""

    before: int | None
    after: int | None


def measure_links(
    *, plane: DataPlane, neighbours: Neighbours, sizes: Mapping[int, int], sequence: int, clock: Clock
) -> dict[int, LinkSeconds]:
    """Seconds of a message of `sizes[peer]` bytes to each neighbour.

    All ranks of the pipeline call it at the same point of a step, when no other message is on its way.

    Raises:
        PeerLostError: a neighbour went away.
    """
    found: dict[int, LinkSeconds] = {}
    for peer, first in ((neighbours.before, False), (neighbours.after, True)):
        if peer is None:
            continue
        line = _Line(plane=plane, peer=peer, sequence=sequence)
        for mine in (first, not first):
            if mine:
                found[peer] = _measure(line, sizes.get(peer, 0), clock)
            else:
                _answer(line)
    return found


@dataclass(kw_only=True, slots=True)
class _Line:
    """Messages to and from one neighbour, numbered in the order in which both sides use them."""

    plane: DataPlane
    peer: int
    sequence: int
    sent: int = 0
    received: int = 0

    def send(self, size: int = 0) -> None:
        tag = Tag(channel=Channel.PROBE, step=self.sequence, micro=self.sent)
        self.sent += 1
        self.plane.send(self.peer, tag, b"", [bytearray(size)] if size else [])

    def receive(self) -> None:
        tag = Tag(channel=Channel.PROBE, step=self.sequence, micro=self.received)
        self.received += 1
        self.plane.recv(self.peer, tag, None, needed=self.plane.peers - {DRIVER_RANK})


def _measure(line: _Line, size: int, clock: Clock) -> LinkSeconds:
    line.receive()  # the other side is ready
    small = min(_round_trip(line, 0, clock) for _ in range(SMALL_ROUNDS))
    large = _round_trip(line, size, clock)
    return LinkSeconds(latency=small / 2, occupied=max(0.0, large - small))


def _round_trip(line: _Line, size: int, clock: Clock) -> float:
    started = clock.monotonic()
    line.send(size)
    line.receive()
    return clock.monotonic() - started


def _answer(line: _Line) -> None:
    line.send()
    for _ in range(SMALL_ROUNDS + 1):
        line.receive()
        line.send()
