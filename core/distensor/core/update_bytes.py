"""How many bytes the workers of a data-parallel group exchange in a step, and how long that takes on given links.

Sparse messages are predicted from the code they are written in (`optim.distro.codec`), for places that are spread
evenly. What a run really sent is counted on its sockets; this is for choosing before there is a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from distensor.core.errors import ConfigError

CHUNK = 4096
"""Elements of a full row of a sparse update: 64 x 64."""
SCALE_BITS = 2.2
"""Of a row's magnitude, coded as the difference to the row before; measured at rows of like size."""


MAX_CHUNK = 1 << 16


def check_share(k: int, chunk: int) -> None:
    """Raise ConfigError for a `chunk` outside 2 to 65536, or a `k` outside 1 to `chunk`."""
    if not 2 <= chunk <= MAX_CHUNK:
        raise ConfigError(f"chunk = {chunk}; expected 2 to {MAX_CHUNK} elements")
    if not 1 <= k <= chunk:
        raise ConfigError(f"k = {k}; expected 1 to {chunk}, of {chunk} elements of a chunk")


def kept_of(length: int, k: int, chunk: int) -> int:
    """How many of a row of `length` travel: the share k / chunk, rounded, at least one."""
    return min(length, max(1, round(length * k / chunk)))


def rice_parameter(length: int, kept: int) -> int:
    """Bits of the fixed part of a coded gap, for `kept` sorted places in a row of `length`.

    The gaps are nearly geometric with mean m = (length - kept) / (kept + 1). A code of them then has b + 1 bits and
    1 / (exp(2**b / m) - 1) more on average; the best b is that of the shortest.
    """
    return min(range(length.bit_length()), key=lambda b: _gap_bits(length, kept, b))


def _gap_bits(length: int, kept: int, b: int) -> float:
    mean = (length - kept) / (kept + 1)
    return b + 1.0 + (1.0 / math.expm1(min(700.0, 2.0**b / mean)) if mean > 0 else 0.0)


def row_bits(length: int, kept: int, value_bits: int = 1) -> float:
    """Bits of a row's part of a message, on average."""
    gap = _gap_bits(length, kept, rice_parameter(length, kept))
    return kept * (gap + value_bits) + SCALE_BITS * value_bits


class Topology(StrEnum):
    """Who sends to whom."""

    RING = "ring all-reduce"
    PEERS = "peer to peer"
    AGGREGATOR = "aggregator"
    HYBRID = "hybrid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one worker in one step, on average over the steps; and of one aggregator, where there are some."""

    method: str
    topology: Topology
    up: float
    down: float
    aggregator_up: float = 0.0
    aggregator_down: float = 0.0

    def seconds(self, *, up_rate: float, down_rate: float) -> float:
        """On a link of these bytes per second, both directions at once, nothing hidden behind computing."""
        return max(self.up / up_rate, self.down / down_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparse:
    """A method that sends `k` entries of each chunk every `every` steps."""

    name: str
    k: int
    value_bits: int = 1
    every: int = 1


SPARSE = (
    Sparse(name="DisTrO-AdamW k=32", k=32),
    Sparse(name="DisTrO-AdamW k=8", k=8),
    Sparse(name="DisTrO-AdamW k=2", k=2),
    Sparse(name="DeMo, DisTrO k=32", k=32),
    Sparse(name="SparseLoCo k=64, every 30", k=64, value_bits=2, every=30),
)
DILOCO_EVERY = 50


def message_bytes(parameters: float, k: int, value_bits: int = 1) -> float:
    """Of one worker's message for a model whose parameters fill whole chunks."""
    return parameters / CHUNK * row_bits(CHUNK, k, value_bits) / 8.0


def traffic_of_all(parameters: float, workers: int, value_bytes: int = 2, sites: int = 2) -> Sequence[Traffic]:
    """Every method on every topology that it runs on.

    Args:
        value_bytes: of a gradient's element where all of them travel.
        sites: with an aggregator and equally many workers each, of the hybrid topology.

    Raises:
        ConfigError: fewer than two workers, fewer than one site or more than workers, or no parameters.
    """
    if workers < 2:
        raise ConfigError(f"workers = {workers}; expected at least 2, one sends to nobody")
    if not 1 <= parameters < 1e15:
        raise ConfigError(f"params = {parameters:g}; expected a number of at least 1")
    if not 1 <= sites <= workers:
        raise ConfigError(f"sites = {sites}; expected 1 to {workers}, each with workers of its own")
    dense = parameters * value_bytes
    ring = 2.0 * (workers - 1) / workers * dense
    found = [
        Traffic(method="AdamW", topology=Topology.RING, up=ring, down=ring),
        Traffic(
            method=f"DiLoCo, every {DILOCO_EVERY}",
            topology=Topology.RING,
            up=ring / DILOCO_EVERY,
            down=ring / DILOCO_EVERY,
        ),
    ]
    for method in SPARSE:
        size = message_bytes(parameters, method.k, method.value_bits) / method.every
        found += _sparse_traffic(method.name, size, workers, sites)
    return found


def _sparse_traffic(name: str, size: float, workers: int, sites: int) -> list[Traffic]:
    """Of messages of `size` bytes: what a worker gets is the same everywhere, since nothing is merged."""
    others, here = (workers - 1) * size, workers / sites
    return [
        Traffic(method=name, topology=Topology.PEERS, up=others, down=others),
        Traffic(
            method=name,
            topology=Topology.AGGREGATOR,
            up=size,
            down=others,
            aggregator_up=workers * others,
            aggregator_down=workers * size,
        ),
        Traffic(
            method=name,
            topology=Topology.HYBRID,
            up=size,
            down=others,
            aggregator_up=here * others + (sites - 1) * here * size,
            aggregator_down=workers * size,
        ),
    ]
