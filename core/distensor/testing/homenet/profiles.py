"""What an access line does to bytes. Pure: times in, times out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from distensor.core.errors import ConfigError

MEGABIT = 1e6 / 8
"""Bytes a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One host's access line.

    `down` and `up` are bytes a second. `rtt` (seconds) and `loss` (share of packets, one way) are those between two
    hosts that both have this profile: each host's line brings half of the way. `queue` is how many seconds of traffic
    wait before the line until further packets are dropped.
    """

    name: str
    down: float
    up: float
    rtt: float
    loss: float = 0.0
    queue: float = 0.1

    def __post_init__(self) -> None:
        if min(self.down, self.up, self.queue) <= 0 or self.rtt < 0 or not 0 <= self.loss < 1:
            raise ConfigError(f"profile {self}: rates and queue are above 0, rtt is not negative, loss is below 1")

    @property
    def delay(self) -> float:
        """Seconds that this host's line adds to each packet, each way."""
        return self.rtt / 4

    @property
    def loss_each(self) -> float:
        """Share of packets that one line loses, so that two of them lose `loss`."""
        return 1 - float((1 - self.loss) ** 0.5)


HOME = Profile(name="home", down=100 * MEGABIT, up=10 * MEGABIT, rtt=0.040, loss=0.01)
DATACENTRE = Profile(name="datacentre", down=1000 * MEGABIT, up=1000 * MEGABIT, rtt=0.002)
LAN = Profile(name="lan", down=1000 * MEGABIT, up=1000 * MEGABIT, rtt=0.0005)


@dataclass(slots=True, kw_only=True)
class Line:
    """One direction of an access line: a queue, then `rate` bytes a second, then `delay` seconds of way."""

    rate: float
    delay: float
    loss: float
    queue: float
    chance: random.Random
    free_at: float = field(default=0.0)
    carried: int = 0
    dropped: int = 0

    def offer(self, now: float, size: int) -> float | None:
        """When `size` bytes that come now are through; None when they are lost on the way or the queue is full."""
        start = max(now, self.free_at)
        if start - now > self.queue or (self.loss and self.chance.random() < self.loss):
            self.dropped += 1
            return None
        self.free_at = start + size / self.rate
        self.carried += size
        return self.free_at + self.delay


def lines_of(profile: Profile, chance: random.Random) -> tuple[Line, Line]:
    """The two directions, (up, down)."""
    up, down = (
        Line(rate=rate, delay=profile.delay, loss=profile.loss_each, queue=profile.queue, chance=chance)
        for rate in (profile.up, profile.down)
    )
    return up, down
