"""Link times and held memory, measured by the ranks themselves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from node_kit import on_all, planes_of

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import PeerLostError
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.node.held_bytes import counting_held_bytes
from distensor.node.link_probe import Neighbours, measure_links
from distensor.transport import DataPlane, Tag


class SlowPlane:
    """A plane whose messages arrive late: `latency` seconds each and one second for each `rate` bytes."""

    def __init__(self, plane: DataPlane, *, latency: float, rate: float) -> None:
        self._plane = plane
        self._latency, self._rate = latency, rate

    @property
    def peers(self) -> frozenset[int]:
        return self._plane.peers

    def send(self, peer: int, tag: Tag, header: bytes = b"", buffers: Sequence[Any] = ()) -> None:
        delay = self._latency + sum(map(len, buffers)) / self._rate
        threading.Timer(delay, self._plane.send, (peer, tag, header, buffers)).start()

    def recv(self, *arguments: Any, **options: Any) -> Any:
        return self._plane.recv(*arguments, **options)


def measured(planes: dict[int, Any], size: int, sequence: int) -> list[dict[int, LinkSeconds]]:
    ranks = len(planes)

    def of_rank(rank: int) -> dict[int, LinkSeconds]:
        neighbours = Neighbours(before=rank - 1 if rank else None, after=rank + 1 if rank < ranks - 1 else None)
        sizes = {rank - 1: size, rank + 1: 2 * size}
        return measure_links(
            plane=planes[rank], neighbours=neighbours, sizes=sizes, sequence=sequence, clock=SYSTEM_CLOCK
        )

    return on_all([lambda rank=rank: of_rank(rank) for rank in range(ranks)])  # type: ignore[misc]


def test_latency_and_rate_are_found_each_way() -> None:
    with planes_of(3) as planes:
        slow: dict[int, Any] = {
            rank: SlowPlane(plane, latency=0.01, rate=1e6) if rank < 2 else plane for rank, plane in planes.items()
        }
        found = measured(slow, 20_000, 1)
    assert [sorted(links) for links in found] == [[1], [0, 2], [1]]
    down, up = found[0][1], found[1][0]
    assert 0.01 <= down.latency < 0.03, "both ways take 10 ms"
    assert 0.04 <= down.occupied + 0.005 < 0.12, "40 kB at 1 MB/s"
    assert 0.02 <= up.occupied + 0.005 < 0.08, "20 kB"
    half = found[1][2]
    assert 0.005 <= half.latency < 0.02, "only one way takes 10 ms"


def test_a_lost_neighbour_ends_the_probe() -> None:
    with planes_of(2) as planes, pytest.raises(PeerLostError, match="rank 1"):
        on_all([lambda: measured_alone(planes[0]), planes[1].close])


def measured_alone(plane: DataPlane) -> None:
    neighbours = Neighbours(before=None, after=1)
    measure_links(plane=plane, neighbours=neighbours, sizes={1: 10}, sequence=1, clock=SYSTEM_CLOCK)


def test_held_bytes_are_those_that_autograd_keeps() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    given = torch.ones(8, 4)
    with counting_held_bytes([weight]) as held:
        made = torch.tanh(given @ weight)
        (made * made).sum()
    assert held.total == 2 * 8 * 4 * 4, "the input of the product and the result of tanh, each once"
    with counting_held_bytes([weight]) as nothing, torch.no_grad():
        torch.tanh(given @ weight)
    assert nothing.total == 0
