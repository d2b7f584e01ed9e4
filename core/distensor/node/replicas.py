"""The other replicas as an optimizer sees them that exchanges updates: the same object in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distensor.optim.distro.exchange import Alone, Exchange


class Replicas:
    """An `Exchange` that goes over another one, which may change between two steps."""

    def __init__(self) -> None:
        self._now: Exchange = Alone()

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
        return self._now.gather(message)

    def mean(self, tensor: Tensor) -> None:
        self._now.mean(tensor)
