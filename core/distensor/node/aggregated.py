"""The exchange of replicas over aggregators, with the direct way between replicas for what those cannot do.

Every replica sends its message to one aggregator and gets the set of all from it. Then the replicas tell each other, on
their own connections, the digest of what they got. Only where all have the same set is it used. Otherwise (an
aggregator died, or gave out different sets) nobody uses any: the messages, which their senders still have, travel
between the replicas, and all alike leave that aggregator for the next one, or for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from distensor.aggregator.words import Hello, Kind, read_set, tag
from distensor.core import Clock
from distensor.core.errors import HandshakeError, TransportError
from distensor.node.membership import Seat
from distensor.optim.distro.agreement import LACKING, digest_of, is_same_for_all
from distensor.optim.distro.exchange import Exchange, GroupExchange
from distensor.optim.sparse_spec import Route, SparseSpec
from distensor.transport import DataPlane, LinkStats, LocalMeeting, Timeouts

CONNECT_SECONDS = 15.0
"""How long an aggregator may take to be reached before it counts as gone."""
ANSWER_SECONDS = 600.0
"""How long one that gives signs of life may take to answer, beyond its patience."""


class Way(Protocol):
    """To one aggregator."""

    def gather(self, message: bytes) -> Sequence[bytes | None] | None:
        """The set of the next round, by place in the group; None where it cannot be had any more."""


class AggregatedExchange:
    """An `Exchange` whose messages go over the first of `ways` that works; with none left, between the `peers`."""

    def __init__(self, peers: GroupExchange, ways: Sequence[Way], on_change: Callable[[str], None]) -> None:
        self._peers = peers
        self._ways = list(ways)
        self._on_change = on_change
        self.rank = peers.rank
        self.size = peers.size

    def gather(self, message: bytes) -> Sequence[bytes | None]:
        if not self._ways:
            return self._peers.gather(message)
        found = self._ways[0].gather(message)
        digest = LACKING if found is None else digest_of(found)
        digests = [other for (other,) in self._peers.share([digest])]
        if found is not None and is_same_for_all(digests):
            return found
        gone = self._ways.pop(0)
        lacking = [rank for rank, other in enumerate(digests) if other == LACKING]
        why = f"replicas {lacking} got no set from it" if lacking else "it gave different sets to different replicas"
        rest = "the next one" if self._ways else "direct messages between replicas"
        self._on_change(f"{gone} is not used any more ({why}); this exchange is repeated, further ones take {rest}")
        return self._peers.gather(message)

    def mean(self, tensor: Tensor) -> None:
        self._peers.mean(tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A rank of a group, and who is in it."""

    rank: int
    hello: Hello


class PlaneWay:
    """To one aggregator, over a plane of its own that is opened in the background."""

    def __init__(self, name: str, aggregator: int, place: Place, open_plane: Callable[[], DataPlane]) -> None:
        self._name = name
        self._aggregator = aggregator
        self._place = place
        self._plane: DataPlane | None = None
        self._number = 0
        self._closed = False
        self._opening = threading.Thread(target=self._open, args=(open_plane,), name=f"to-{name}", daemon=True)
        self._opening.start()

    def __str__(self) -> str:
        return f"aggregator {self._name} (rank {self._aggregator})"

    def _open(self, open_plane: Callable[[], DataPlane]) -> None:
        try:
            plane = open_plane()
        except (TransportError, HandshakeError):
            return  # `gather` finds that there is none
        self._plane = plane
        if self._closed:
            plane.close()

    def gather(self, message: bytes) -> Sequence[bytes | None] | None:
        self._opening.join()
        plane = self._plane
        if plane is None:
            return None
        try:
            return self._gather(plane, message)
        except TransportError:  # whatever it was: the others are asked whether they have the set
            return None

    def _gather(self, plane: DataPlane, message: bytes) -> Sequence[bytes | None]:
        hello, to, slot = self._place.hello, self._aggregator, self._place.hello.slot
        if self._number == 0:
            plane.send(to, tag(Kind.HELLO, 0, slot), hello.to_bytes())
        self._number += 1
        plane.send(to, tag(Kind.UPDATE, self._number, slot), b"", (message,))
        answer = plane.recv(to, tag(Kind.SET, self._number, slot), ANSWER_SECONDS + (hello.patience or 0.0))
        found = read_set(hello.group, answer, own=(self._place.rank, message))
        return [found.get(rank) for rank in hello.group]

    def stats(self) -> Mapping[int, LinkStats]:
        return {} if self._plane is None else self._plane.stats()

    def close(self) -> None:
        self._closed = True
        if self._plane is not None:
            self._plane.close()


class Aggregators:
    """Those of one epoch, as one rank sees them."""

    def __init__(self, seat: Seat, *, timeouts: Timeouts, clock: Clock, on_change: Callable[[str], None]) -> None:
        self._seat = seat
        self._timeouts = replace(timeouts, connect=CONNECT_SECONDS)
        self._clock = clock
        self._on_change = on_change
        self._ways: dict[int, PlaneWay] = {}

    def exchange(self, peers: GroupExchange, spec: SparseSpec, group: Sequence[int]) -> Exchange:
        """The way of the replicas of `group`, ascending ranks, that `spec` asks for, as far as this epoch has it."""
        if spec.topology is Route.PEERS or not self._seat.aggregators:
            return peers
        places = site_places(self._seat.names, sorted(self._seat.aggregators), spec, tuple(group))
        own = places[self._seat.assignment.rank]
        return AggregatedExchange(peers, [self._way(rank, hello) for rank, hello in own], self._on_change)

    def _way(self, aggregator: int, hello: Hello) -> PlaneWay:
        """A second load in the same epoch goes on with the connection and the rounds of the first."""
        if aggregator not in self._ways:
            place = Place(rank=self._seat.assignment.rank, hello=hello)
            name = self._seat.names.get(aggregator, "")
            self._ways[aggregator] = PlaneWay(name, aggregator, place, lambda: self._open(aggregator))
        return self._ways[aggregator]

    def _open(self, aggregator: int) -> DataPlane:
        return DataPlane.open(
            me=self._seat.me,
            credentials=self._seat.credentials,
            listener=None,
            peers={aggregator: self._seat.aggregators[aggregator]},
            timeouts=self._timeouts,
            clock=self._clock,
            driver=False,
            local=LocalMeeting(),
            relay=self._seat.relay,
        )

    def stats(self) -> Mapping[int, LinkStats]:
        """Bytes and messages by the rank of the aggregator."""
        return {peer: stats for way in self._ways.values() for peer, stats in way.stats().items()}

    def close(self) -> None:
        for way in self._ways.values():
            way.close()


def site_places(
    names: Mapping[int, str], aggregators: Sequence[int], spec: SparseSpec, group: tuple[int, ...]
) -> dict[int, list[tuple[int, Hello]]]:
    """For each rank of the group: the aggregators that it may use, in this order, with what it says to them. Pure.

    With sites, a rank uses the one of its node's site (of the first site, where its node is in none) and no other; so
    do all where an aggregator of some site that has members is missing: then nobody uses any.

    Args:
        names: the node of each rank, those of aggregators included.
    """
    if spec.topology is Route.AGGREGATOR:
        hello = Hello(group=group, site=group, patience=spec.patience)
        return {rank: [(aggregator, hello) for aggregator in aggregators] for rank in group}
    site_of_node = {node: site for site, nodes in spec.sites for node in nodes}
    first = spec.sites[0][0]
    site_of = {rank: site_of_node.get(names.get(rank, ""), first) for rank in group}
    at = {names.get(aggregator, ""): aggregator for aggregator in reversed(aggregators)}
    used = sorted(set(site_of.values()))
    if any(site not in at for site in used):
        return {rank: [] for rank in group}
    return {
        rank: [
            (
                at[site],
                Hello(
                    group=group,
                    site=tuple(other for other in group if site_of[other] == site),
                    others=tuple(sorted(at[other] for other in used if other != site)),
                    patience=spec.patience,
                ),
            )
        ]
        for rank, site in site_of.items()
    }
