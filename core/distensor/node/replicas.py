"""The other replicas as an optimizer sees them that exchanges updates: the same object in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distensor.core import Clock
from distensor.optim.distro.exchange import Alone, Exchange


class Replicas:
    """An `Exchange` that goes over another one, which may change between two steps."""

    def __init__(self, clock: Clock) -> None:
        self._now: Exchange = Alone()
        self._clock = clock
        self.seconds = 0.0
        """In exchanges so far, waiting for the others included."""

    def bind(self, exchange: Exchange) -> None:
        """Use `exchange` from now on."""
        self._now = exchange

    @property
    def rank(self) -> int:
        return self._now.rank

    @property
    def size(self) -> int:
        return self._now.size

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        began = self._clock.monotonic()
        messages = self._now.gather(message)
        self.seconds += self._clock.monotonic() - began
        return messages

    def mean(self, tensor: Tensor) -> None:
        began = self._clock.monotonic()
        self._now.mean(tensor)
        self.seconds += self._clock.monotonic() - began
