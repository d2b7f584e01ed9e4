"""A limit on refused attempts, for each host. Pure: the time is given.

Secrets have 256 random bits, so this is not against guessing: it keeps a host that shows wrong keys in a loop from
costing a look into the books, and a line of the audit log, for each of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

MOST_HOSTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """So many refusals within so many seconds."""

    failures: int = 20
    seconds: float = 60.0


DEFAULT_LIMIT = Limit()


class Throttle:
    """The newest refusals of each host; the hosts that were refused longest ago are forgotten first."""

    def __init__(self, limit: Limit = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, host: str, now: float) -> float:
        """After how many seconds the host may try again; 0 when it may now."""
        times = self._refused.get(host)
        if times is None or len(times) < self._limit.failures:
            return 0.0
        return max(0.0, times[0] + self._limit.seconds - now)

    def failed(self, host: str, now: float) -> None:
        """An attempt was refused."""
        times = self._refused.setdefault(host, deque(maxlen=self._limit.failures))
        times.append(now)
        self._refused.move_to_end(host)
        while len(self._refused) > MOST_HOSTS:
            self._refused.popitem(last=False)
