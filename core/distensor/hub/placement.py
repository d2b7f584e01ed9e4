"""Where the ranks of a job go, and why. Pure, and the same answer for the same question.

The rule: each replica (all ranks with one dp coordinate) goes whole onto one node, so that replicas spread over
machines while a replica's activations stay inside one. A replica that fits nowhere whole is cut by pipeline stage, a
stage by context and then tensor coordinate. A part prefers the node of the part before it, then nodes at its site, then
those that are at least twice as fast, then the one with the most free slots. Ties go by name, then id. Inside a node
accelerators come first, then faster devices. Ranks go only where their memory fits.

A node is as fast as the next of its devices was measured; one that nobody has measured counts as usual for its kind.
Two nodes are at one site when the hub sees them in one network, so that what they say to each other does not cross the
internet. A tensor-parallel group, whose ranks talk within every layer, is never split over sites unless the job says
so.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from distensor.core.control import DeviceKind, JobSpec
from distensor.core.errors import PlacementError
from distensor.core.ids import DeviceId, NodeId, Rank
from distensor.core.job_report import MOST_PASSED, PassedNode
from distensor.core.parallel import Axis, RankLayout
from distensor.hub.records import Placement

_KINDS = tuple(kind for kind in DeviceKind if kind is not DeviceKind.AGGREGATOR)
_PREFERENCE = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.MPS, DeviceKind.MLX, DeviceKind.CPU)
_USUAL = {
    DeviceKind.CUDA: 1e13,
    DeviceKind.ROCM: 1e13,
    DeviceKind.MPS: 3e12,
    DeviceKind.MLX: 3e12,
    DeviceKind.CPU: 2e11,
}
"""Float32 operations a second of a device that nobody has measured: right to a factor of ten."""
_CUTS = (Axis.DP, Axis.PP, Axis.CP, Axis.TP)
_PARTS = ("alone:", "tensor group together:", "stage together:", "whole replica together:")
"""How much is placed at once, by the number of cuts that are left."""
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOffer:
    """What is left of a device. `free_bytes` is None when the node cannot tell."""

    device_id: DeviceId
    kind: DeviceKind
    slots: int
    free_bytes: int | None = None
    flops: float | None = None
    """Measured operations a second; None where nobody has measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """What a node offers now."""

    node_id: NodeId
    name: str
    devices: tuple[DeviceOffer, ...]
    site: str = ""
    """The network in which the hub sees it."""
    accepting: bool = True

    @property
    def slots(self) -> int:
        """For ranks of a mesh; room for aggregators does not count."""
        return sum(device.slots for device in self.devices if device.kind is not DeviceKind.AGGREGATOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank's device."""

    rank: Rank
    node_id: NodeId
    device_id: DeviceId
    why: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A node that got no rank, and why."""

    node_id: NodeId
    name: str
    why: str


def place(
    spec: JobSpec, offers: Sequence[NodeOffer], away: int = 0, only: Sequence[Rank] | None = None
) -> tuple[Place, ...]:
    """A device for every rank, in order of rank; or for those of `only`. `away` is the number of known nodes that are
    not connected. Aggregators follow, with the ranks after those of the mesh; with `only` as many as there is room for.

    Raises:
        PlacementError: too few free slots, too little memory for a rank, a tensor-parallel group that only fits over
            several sites, or no room for an aggregator.
    """
    board = _Board(spec, offers)
    everyone = [Rank(rank) for rank in range(spec.parallel.world_size)] if only is None else list(only)
    free = sum(board.free(node_id) for node_id in board.nodes)
    if len(everyone) > free:
        raise PlacementError(_too_few(spec, len(everyone), board, free, away))
    layout = RankLayout(spec.parallel)
    for replica in _split(layout, everyone, Axis.DP):
        _put(board, layout, replica, _CUTS[1:], near=None)
    _put_aggregators(board, spec, strict=only is None)
    return tuple(sorted(board.places, key=lambda place: place.rank))


def _put_aggregators(board: _Board, spec: JobSpec, *, strict: bool) -> None:
    """The ranks after those of the mesh. Not `strict`: as many as there is room for."""
    rank = spec.parallel.world_size
    for wanted in spec.aggregators:
        if board.take_aggregator(Rank(rank), wanted):
            rank += 1
        elif strict:
            raise PlacementError(_no_aggregator(spec, wanted, board))


def _no_aggregator(spec: JobSpec, wanted: str, board: _Board) -> str:
    names = ", ".join(offer.name for offer in board.nodes.values()) or "none"
    where = f"on node {wanted!r}" if wanted else "on any node"
    return (
        f"job {spec.name!r} needs an aggregator {where}, and there is no room for one (connected nodes: {names}). "
        "Start one with `distensor aggregator`, name a node with a free CPU worker, or use topology='peers'."
    )


def _put(
    board: _Board, layout: RankLayout, ranks: list[Rank], cuts: Sequence[Axis], near: NodeId | None
) -> NodeId | None:
    """Place the ranks together where they fit, else in parts. Returns the node of the last one."""
    for node_id in board.by_preference(near):
        if board.take(node_id, ranks, f"{_PARTS[len(cuts)]} {board.why(node_id, near)}"):
            return node_id
    if not cuts:
        raise PlacementError(board.no_memory(ranks[0]))
    if cuts[0] is Axis.TP and len(ranks) > 1:
        return _put_tensor_group(board, layout, ranks, near)
    return _put_parts(board, layout, ranks, cuts, near)


def _put_parts(
    board: _Board, layout: RankLayout, ranks: list[Rank], cuts: Sequence[Axis], near: NodeId | None
) -> NodeId | None:
    for part in _split(layout, ranks, cuts[0]):
        near = _put(board, layout, part, cuts[1:], near)
    return near


def _put_tensor_group(board: _Board, layout: RankLayout, ranks: list[Rank], near: NodeId | None) -> NodeId | None:
    """Split a group that fits on no node over the nodes of one site, or over all of them where the job says so."""
    for site in board.sites(near):
        with board.only(site) as trial:
            try:
                return _put_parts(board, layout, ranks, _CUTS[-1:], near)
            except PlacementError:
                trial.undo()
    if not board.spec.split_tensor:
        raise PlacementError(board.no_site(ranks))
    return _put_parts(board, layout, ranks, _CUTS[-1:], near)


def _split(layout: RankLayout, ranks: list[Rank], axis: Axis) -> list[list[Rank]]:
    parts: dict[int, list[Rank]] = {}
    for rank in ranks:
        parts.setdefault(layout.coordinates(rank).on(axis), []).append(rank)
    return [parts[index] for index in sorted(parts)]


class _Board:
    """The free places while a job is being laid out."""

    def __init__(self, spec: JobSpec, offers: Sequence[NodeOffer]) -> None:
        self.spec = spec
        self.places: list[Place] = []
        self.nodes = {offer.node_id: offer for offer in offers}
        self._devices = {offer.node_id: _usable(offer, spec) for offer in offers}
        self._site: str | None = None

    def take_aggregator(self, rank: Rank, wanted: str) -> bool:
        """A place on the wanted node (empty: on any that has room for aggregators, but one for each job)."""
        taken = {place.node_id for place in self.places if place.rank >= self.spec.parallel.world_size}
        for node_id in self.by_preference(None):
            named = self.nodes[node_id].name == wanted
            here = {place.device_id for place in self.places if place.node_id == node_id}
            for device in self.nodes[node_id].devices:
                serves = device.kind is DeviceKind.AGGREGATOR and (named or (not wanted and node_id not in taken))
                left = next((d.slots for d in self._devices[node_id] if d.device_id == device.device_id), 0)
                works = named and device.kind is DeviceKind.CPU and left > 0
                if (serves and device.slots > 0 and device.device_id not in here) or works:
                    self.places.append(
                        Place(
                            rank=rank,
                            node_id=node_id,
                            device_id=device.device_id,
                            why="an aggregator, where the job wants it",
                        )
                    )
                    return True
        return False

    def free(self, node_id: NodeId) -> int:
        return sum(device.slots for device in self._devices[node_id])

    def by_preference(self, near: NodeId | None) -> list[NodeId]:
        """The nodes that may be taken, the best first."""
        home = self._site_of(near)

        def order(node_id: NodeId) -> tuple[bool, bool, int, int, str, str]:
            node = self.nodes[node_id]
            far = home is not None and node.site != home
            return node_id != near, far, -_speed_class(self._devices[node_id]), -self.free(node_id), node.name, node_id

        return sorted((n for n in self.nodes if self._site in (None, self.nodes[n].site)), key=order)

    def why(self, node_id: NodeId, near: NodeId | None) -> str:
        """Why this node was tried when it was."""
        home = self._site_of(near)
        if node_id == near:
            return "on the node of the part before"
        if home is not None and self.nodes[node_id].site == home:
            return "at the site of the part before, the fastest node there, then the one with the most free slots"
        return "the fastest node with room, then the one with the most free slots"

    def sites(self, near: NodeId | None) -> list[str]:
        """All sites, the one of `near` first, then those with the most free slots."""
        free: Counter[str] = Counter()
        for node_id, node in self.nodes.items():
            free[node.site] += self.free(node_id)
        return sorted(free, key=lambda site: (site != self._site_of(near), -free[site], site))

    @contextmanager
    def only(self, site: str) -> Iterator[_Trial]:
        """Within the block only nodes of this site are taken."""
        self._site, before = site, (dict(self._devices), list(self.places))
        trial = _Trial()
        try:
            yield trial
        finally:
            self._site = None
            if trial.undone:
                self._devices, self.places = before

    def _site_of(self, node_id: NodeId | None) -> str | None:
        return None if node_id is None else self.nodes[node_id].site

    def take(self, node_id: NodeId, ranks: list[Rank], why: str) -> bool:
        """Put all the ranks on the node, or none."""
        devices = list(self._devices[node_id])
        if self.free(node_id) < len(ranks):
            return False
        taken: list[Place] = []
        for rank in ranks:
            index = next((i for i, device in enumerate(devices) if self._fits(device, rank)), None)
            if index is None:
                return False
            taken.append(Place(rank=rank, node_id=node_id, device_id=devices[index].device_id, why=why))
            devices[index] = self._less(devices[index], rank)
        self._devices[node_id] = devices
        self.places += taken
        return True

    def no_site(self, ranks: list[Rank]) -> str:
        members = ", ".join(map(str, ranks[:_MOST_NAMED])) + (" ..." if len(ranks) > _MOST_NAMED else "")
        room = ", ".join(
            f"{offer.name} {self.free(node_id)}" for node_id, offer in list(self.nodes.items())[:_MOST_NAMED]
        )
        return (
            f"job {self.spec.name!r}: the tensor-parallel group of ranks {members} fits on no node and no site (free "
            f"slots: {room}), and its ranks talk within every layer. Use a smaller tensor_parallel, connect a larger "
            "node, or let the job say that it may be split over slow links (DISTENSOR_SPLIT_TENSOR=1 for a Trainer)."
        )

    def no_memory(self, rank: Rank) -> str:
        need = self._need(rank)
        largest = max(
            (device.free_bytes or 0 for devices in self._devices.values() for device in devices if device.slots),
            default=0,
        )
        return (
            f"job {self.spec.name!r}: rank {rank} needs {need:,} bytes, the largest free device has "
            f"{largest:,} bytes left. Cut the model into more stages or connect a larger device."
        )

    def _need(self, rank: Rank) -> int:
        return self.spec.bytes_per_rank[rank] if self.spec.bytes_per_rank else 0

    def _fits(self, device: DeviceOffer, rank: Rank) -> bool:
        return device.slots > 0 and (device.free_bytes is None or device.free_bytes >= self._need(rank))

    def _less(self, device: DeviceOffer, rank: Rank) -> DeviceOffer:
        left = None if device.free_bytes is None else device.free_bytes - self._need(rank)
        return replace(device, slots=device.slots - 1, free_bytes=left)


class _Trial:
    """Whether what was taken within a block is to be given back."""

    undone = False

    def undo(self) -> None:
        self.undone = True


def _usable(offer: NodeOffer, spec: JobSpec) -> list[DeviceOffer]:
    """Accelerators first, then the faster ones."""
    kinds = spec.device_kinds or _KINDS
    return sorted(
        (device for device in offer.devices if device.kind in kinds and device.slots > 0),
        key=lambda device: (_PREFERENCE.index(device.kind), -(device.flops or 0.0)),
    )


def _speed_class(devices: Sequence[DeviceOffer]) -> int:
    """How often the speed of the next device to be taken doubles one operation a second."""
    free = next((device for device in devices if device.slots), None)
    return 0 if free is None else int(math.log2(free.flops or _USUAL[free.kind]))


def passed_over(spec: JobSpec, offers: Sequence[NodeOffer], places: Sequence[Place]) -> tuple[Passed, ...]:
    """The nodes that got none of these ranks, and why; `offers` are those from before."""
    taken = {place.node_id for place in places}
    return tuple(
        Passed(node_id=offer.node_id, name=offer.name, why=_why_passed(spec, offer))
        for offer in sorted(offers, key=lambda offer: (offer.name, offer.node_id))
        if offer.node_id not in taken
    )


def explained(spec: JobSpec, offers: Sequence[NodeOffer], places: Sequence[Place]) -> Placement:
    """The reasons as a job keeps them."""
    passed = passed_over(spec, offers, places)[:MOST_PASSED]
    return Placement(
        whys=tuple(place.why for place in places),
        passed=tuple(PassedNode(node=one.name, why=one.why) for one in passed),
    )


def _why_passed(spec: JobSpec, offer: NodeOffer) -> str:
    if not offer.accepting:
        return "it takes no new work now: paused, draining or outside its hours"
    if not any(device.slots for device in offer.devices):
        return "no free slot"
    usable = _usable(offer, spec)
    if not usable:
        return f"no free slot of kind {' or '.join(spec.device_kinds)}"
    need = min(spec.bytes_per_rank, default=0)
    most = max((device.free_bytes for device in usable if device.free_bytes is not None), default=None)
    if most is not None and most < need and all(device.free_bytes is not None for device in usable):
        return f"too little memory: {most:,} bytes free, the smallest rank needs {need:,}"
    return "not needed: other nodes were nearer to the rest, faster, or had more free slots"


def site_of(host: str) -> str:
    """The network of a host as the hub sees it; empty for the hub's own machine.

    Private networks count as one site: the /24 of an IPv4 address, the /64 of an IPv6 one. Behind one public IPv4
    address is one site; of a public IPv6 address the /64 is.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_loopback:
        return ""
    if address.version == 4 and not address.is_private:
        return str(address)
    return str(ipaddress.ip_network(f"{address}/{24 if address.version == 4 else 64}", strict=False))


def _too_few(spec: JobSpec, ranks: int, board: _Board, free: int, away: int) -> str:
    names = [f"{offer.name} {board.free(node_id)}" for node_id, offer in board.nodes.items()]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    where = f" ({', '.join(names[:_MOST_NAMED])}{more})" if names else ""
    kinds = f" of kind {' or '.join(spec.device_kinds)}" if spec.device_kinds else ""
    absent = f" ({away} more known and not connected right now)" if away else ""
    return (
        f"job {spec.name!r} needs {ranks} workers ({spec.parallel.describe()}), but the mesh has "
        f"{free} free slots{kinds} on {len(names)} connected nodes{where}{absent}. "
        "Connect more nodes, wait until others are free, or use a smaller ParallelConfig."
    )
