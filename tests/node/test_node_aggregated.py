"""Replicas that exchange over aggregators: real planes with TLS in one process; aggregators that die and that lie."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from transport_kit import JOB, QUICK, Authority, mesh, peer

from distensor.aggregator.serving import Serving, open_plane
from distensor.core import SYSTEM_CLOCK, DeviceId, Epoch, ParallelConfig, Rank
from distensor.core.control import DeviceKind
from distensor.core.update_bytes import Topology, traffic_of_all
from distensor.node.aggregated import AggregatedExchange, Aggregators, site_places
from distensor.node.ipc import WorkerAssignment
from distensor.node.membership import Seat
from distensor.optim.distro import DisTrOAdamW
from distensor.optim.distro.exchange import Alone, GroupExchange
from distensor.optim.sparse_spec import Route, SparseRule, SparseSpec
from distensor.transport import DataPlane, Listener
from distensor.transport.group import TransportGroup

WORLD = 4
NAMES = {0: "atlas", 1: "atlas", 2: "bolt", 3: "bolt", 4: "one", 5: "two"}
STAR = SparseSpec(rule=SparseRule.DISTRO, topology=Route.AGGREGATOR, aggregators=("one", "two"))
TOPOLOGIES = {
    Route.PEERS: Topology.PEERS,
    Route.AGGREGATOR: Topology.AGGREGATOR,
    Route.HYBRID: Topology.HYBRID,
}
SITES = SparseSpec(rule=SparseRule.DISTRO, topology=Route.HYBRID, sites=(("one", ("atlas",)), ("two", ("bolt",))))


class Cluster:
    """Four ranks and two aggregators."""

    def __init__(self, authority: Authority, planes: dict[int, DataPlane]) -> None:
        self.planes = planes
        self._authority = authority
        self.listeners = {rank: Listener.bind("127.0.0.1") for rank in (4, 5)}
        self.addresses = {rank: listener.address for rank, listener in self.listeners.items()}
        self.aggregators = {rank: self._serve(rank) for rank in self.listeners}
        self.told: list[str] = []
        self.groups = [
            TransportGroup(planes[rank], range(WORLD), rank, name="g", timeout=30.0, clock=SYSTEM_CLOCK)
            for rank in range(WORLD)
        ]
        self.seen = [self._aggregators_of(rank) for rank in range(WORLD)]

    def _serve(self, rank: int) -> DataPlane:
        others = {r: a for r, a in self.addresses.items() if r != rank}
        peers = {**dict.fromkeys(range(WORLD), self.planes[0].me and self.addresses[rank]), **others}
        own, listener = self._authority.place(rank), self.listeners[rank]
        plane = open_plane(peer(rank), own, listener, peers, clock=SYSTEM_CLOCK, timeouts=QUICK)
        serving = Serving(plane, SYSTEM_CLOCK, frozenset(range(WORLD)))
        self.thread = threading.Thread(target=serving.run, daemon=True)
        self.thread.start()
        return plane

    def _aggregators_of(self, rank: int) -> Aggregators:
        assignment = WorkerAssignment(
            job_id=JOB, job_name="t", epoch=Epoch(1), rank=Rank(rank), parallel=ParallelConfig(data_parallel=WORLD),
            device_kind=DeviceKind.CPU, device_id=DeviceId("cpu"), listen_host="127.0.0.1", threads=1,
            memory_limit=None,
        )  # fmt: skip
        seat = Seat(
            assignment=assignment,
            credentials=self._authority.place(rank),
            peers={},
            aggregators=cast("Any", self.addresses),
            names=NAMES,
        )
        return Aggregators(seat, timeouts=QUICK, clock=SYSTEM_CLOCK, on_change=self.told.append)

    def exchanges(self, spec: SparseSpec) -> list[Any]:
        cpu = torch.device("cpu")
        return [
            self.seen[rank].exchange(GroupExchange(self.groups[rank], cpu), spec, range(WORLD)) for rank in range(WORLD)
        ]

    def close(self) -> None:
        closing = [threading.Thread(target=each.close) for each in (*self.seen, *self.aggregators.values())]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(10)
        for group in self.groups:
            group.shutdown()
        for listener in self.listeners.values():
            listener.close()


@contextmanager
def cluster() -> Iterator[Cluster]:
    authority = Authority()
    with mesh(authority, WORLD) as planes:
        opened = Cluster(authority, planes)
        try:
            yield opened
        finally:
            opened.close()


def gather(exchanges: Sequence[Any], messages: Sequence[bytes]) -> list[Sequence[bytes | None]]:
    results: dict[int, Sequence[bytes | None]] = {}

    def run(rank: int) -> None:
        results[rank] = exchanges[rank].gather(messages[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(len(exchanges))]


def message(turn: int, rank: int) -> bytes:
    return bytes([turn, rank]) * (50_000 + 10_000 * rank) if (turn, rank) != (1, 2) else b""


@pytest.mark.parametrize("spec", [STAR, SITES], ids=["aggregator", "hybrid"])
def test_all_get_the_same_and_send_one_copy(spec: SparseSpec) -> None:
    with cluster() as opened:
        exchanges = opened.exchanges(spec)
        for turn in range(3):
            sent = [message(turn, rank) for rank in range(WORLD)]
            assert [list(found) for found in gather(exchanges, sent)] == [sent] * WORLD
        own = [sum(len(message(turn, rank)) for turn in range(3)) for rank in range(WORLD)]
        for rank in range(WORLD):
            stats = opened.seen[rank].stats()[4 if spec is STAR or rank < 2 else 5]
            others = sum(own) - own[rank]
            assert own[rank] <= stats.bytes_sent < own[rank] + 9000  # the hello, prefixes, signs of life
            assert others <= stats.bytes_received < others + 9000
        assert opened.told == []


@pytest.mark.parametrize("spec", [STAR, SITES], ids=["aggregator", "hybrid"])
def test_an_aggregator_dies_and_nothing_is_lost(spec: SparseSpec) -> None:
    with cluster() as opened:
        exchanges = opened.exchanges(spec)
        gather(exchanges, [message(0, rank) for rank in range(WORLD)])
        opened.aggregators[4].close()
        for turn in range(1, 4):
            sent = [message(turn, rank) for rank in range(WORLD)]
            assert [list(found) for found in gather(exchanges, sent)] == [sent] * WORLD
        told = "the next one" if spec is STAR else "direct messages"
        assert len(opened.told) == WORLD
        assert all("this exchange is repeated" in line and told in line for line in opened.told)


def test_one_that_gives_out_different_sets_is_left() -> None:
    class Lies:
        def __init__(self, found: list[bytes]) -> None:
            self._found = found

        def gather(self, message: bytes) -> list[bytes]:
            return self._found

    with cluster() as opened:
        cpu = torch.device("cpu")
        told: list[str] = []
        exchanges = [
            AggregatedExchange(GroupExchange(opened.groups[rank], cpu), [Lies([b"a", b"b", b"c", bytes([rank // 2])])],
                               told.append)
            for rank in range(WORLD)
        ]  # fmt: skip
        sent = [message(0, rank) for rank in range(WORLD)]
        assert [list(found) for found in gather(exchanges, sent)] == [sent] * WORLD
        assert all("different sets" in line for line in told)


@pytest.mark.parametrize("route", list(Route))
def test_what_travels_is_what_was_predicted(route: Route) -> None:
    """Real updates of four million weights, counted on the sockets, beside what `distensor bandwidth` says."""
    weight = torch.nn.Parameter(torch.zeros(2048, 2048))
    sent = []
    for rank in range(WORLD):
        optimizer = DisTrOAdamW([weight], k=32, eps=1.0, exchange=Alone())  # else the first update is all ones
        weight.grad = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(rank))
        sent.append(optimizer.propose())
    spec = {Route.AGGREGATOR: STAR, Route.HYBRID: SITES, Route.PEERS: SparseSpec(rule=SparseRule.DISTRO)}[route]
    with cluster() as opened:
        exchanges = opened.exchanges(spec)
        gather(exchanges, [b""] * WORLD)  # connections, hellos

        def moved() -> tuple[int, int]:
            links = [*opened.planes[3].stats().values(), *opened.seen[3].stats().values()]
            return sum(link.bytes_sent for link in links), sum(link.bytes_received for link in links)

        before, rounds = moved(), 5
        for _ in range(rounds):
            assert gather(exchanges, sent)[3] == sent
        after = moved()
    (row,) = [
        row for row in traffic_of_all(weight.numel(), WORLD)
        if row.method == "DisTrO-AdamW k=32" and row.topology == TOPOLOGIES[route]
    ]  # fmt: skip
    up, down = ((now - then) / rounds for then, now in zip(before, after, strict=True))
    # Beside the messages: lengths, digests and prefixes, a few hundred bytes a round, and signs of life.
    assert row.up * 0.97 <= up <= row.up * 1.03 + 3000
    assert row.down * 0.97 <= down <= row.down * 1.03 + 3000


def test_who_goes_where() -> None:
    star = site_places(NAMES, [4, 5], STAR, (0, 2))
    assert [aggregator for aggregator, _ in star[0]] == [4, 5]
    hybrid = site_places(NAMES, [4, 5], SITES, (0, 1, 2, 3))
    (at, hello), = hybrid[3]  # fmt: skip
    assert (at, hello.site, hello.others) == (5, (2, 3), (4,))
    assert site_places(NAMES, [5], SITES, (0, 2)) == {0: [], 2: []}  # one site has none: all go direct
    alone = site_places(NAMES, [4, 5], SITES, (0, 1))
    assert alone[0][0][1].others == ()  # nobody of the other site is in this group
