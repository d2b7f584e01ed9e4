"""Link times and held memory, measured by the ranks themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from node_kit import on_all, planes_of

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import PeerLostError
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.node.held_bytes import counting_held_bytes
from distensor.node.link_probe import Neighbours, measure_links
from distensor.testing.slow_links import SlowPlane
from distensor.transport import DataPlane


def slow(plane: DataPlane) -> SlowPlane:
    return SlowPlane(plane, lambda _, size: LinkSeconds(latency=0.01, occupied=size / 1e6), SYSTEM_CLOCK)


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
        slowed: dict[int, Any] = {**planes, 0: slow(planes[0]), 1: slow(planes[1])}
        found = measured(slowed, 20_000, 1)
        for rank in range(2):
            slowed[rank].close()
    assert [sorted(links) for links in found] == [[1], [0, 2], [1]]
    down, up = found[0][1], found[1][0]
    assert 0.01 <= down.latency < 0.05, "both ways take 10 ms"
    assert 0.04 <= down.occupied + 0.01 < 0.3, "40 kB at 1 MB/s"
    assert 0.02 <= up.occupied + 0.01 < 0.3, "20 kB"
    half = found[1][2]
    assert 0.005 <= half.latency < 0.05, "only one way takes 10 ms"


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
