"""Where the ranks of a job go. Pure, and the same answer for the same question.

The rule: each replica (all ranks with one dp coordinate) goes whole onto the node with the most free slots, so
that replicas spread over machines while a replica's activations stay inside one. A replica that fits nowhere whole
is cut by pipeline stage, a stage by context and then tensor coordinate; such a part prefers the node of the part
before it, then the node with the most free slots. Ties go by name, then id. Inside a node accelerators come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distensor.core.control import DeviceKind, JobSpec
from distensor.core.errors import PlacementError
from distensor.core.ids import DeviceId, NodeId, Rank
from distensor.core.parallel import Axis, RankLayout

_KINDS = tuple(kind for kind in DeviceKind if kind is not DeviceKind.AGGREGATOR)
_PREFERENCE = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.MPS, DeviceKind.MLX, DeviceKind.CPU)
_CUTS = (Axis.DP, Axis.PP, Axis.CP, Axis.TP)
_MOST_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOffer:
    """What is left of a device. `free_bytes` is None when the node cannot tell."""

    device_id: DeviceId
    kind: DeviceKind
    slots: int
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """What a node offers now."""

    node_id: NodeId
    name: str
    devices: tuple[DeviceOffer, ...]

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


def place(
    spec: JobSpec, offers: Sequence[NodeOffer], away: int = 0, only: Sequence[Rank] | None = None
) -> tuple[Place, ...]:
    """A device for every rank, in order of rank; or for those of `only`. `away` is the number of known nodes that are
    not connected. Aggregators follow, with the ranks after those of the mesh; with `only` as many as there is room for.

    Raises:
        PlacementError: too few free slots, too little memory for a rank, or no room for an aggregator.
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
        if board.take(node_id, ranks):
            return node_id
    if not cuts:
        raise PlacementError(board.no_memory(ranks[0]))
    for part in _split(layout, ranks, cuts[0]):
        near = _put(board, layout, part, cuts[1:], near)
    return near


def _split(layout: RankLayout, ranks: list[Rank], axis: Axis) -> list[list[Rank]]:
    parts: dict[int, list[Rank]] = {}
    for rank in ranks:
        parts.setdefault(layout.coordinates(rank).on(axis), []).append(rank)
    return [parts[index] for index in sorted(parts)]


class _Board:
    """The free places while a job is being laid out."""

    def __init__(self, spec: JobSpec, offers: Sequence[NodeOffer]) -> None:
        kinds = spec.device_kinds or _KINDS
        self._spec = spec
        self.places: list[Place] = []
        self.nodes = {offer.node_id: offer for offer in offers}
        self._devices = {
            offer.node_id: sorted(
                (device for device in offer.devices if device.kind in kinds and device.slots > 0),
                key=lambda device: _PREFERENCE.index(device.kind),
            )
            for offer in offers
        }

    def take_aggregator(self, rank: Rank, wanted: str) -> bool:
        """A place on the wanted node (empty: on any that has room for aggregators, but one for each job)."""
        taken = {place.node_id for place in self.places if place.rank >= self._spec.parallel.world_size}
        for node_id in self.by_preference(None):
            named = self.nodes[node_id].name == wanted
            here = {place.device_id for place in self.places if place.node_id == node_id}
            for device in self.nodes[node_id].devices:
                serves = device.kind is DeviceKind.AGGREGATOR and (named or (not wanted and node_id not in taken))
                left = next((d.slots for d in self._devices[node_id] if d.device_id == device.device_id), 0)
                works = named and device.kind is DeviceKind.CPU and left > 0
                if (serves and device.slots > 0 and device.device_id not in here) or works:
                    self.places.append(Place(rank=rank, node_id=node_id, device_id=device.device_id))
                    return True
        return False

    def free(self, node_id: NodeId) -> int:
        return sum(device.slots for device in self._devices[node_id])

    def by_preference(self, near: NodeId | None) -> list[NodeId]:
        def order(node_id: NodeId) -> tuple[bool, int, str, str]:
            return node_id != near, -self.free(node_id), self.nodes[node_id].name, node_id

        return sorted(self.nodes, key=order)

    def take(self, node_id: NodeId, ranks: list[Rank]) -> bool:
        """Put all the ranks on the node, or none."""
        devices = list(self._devices[node_id])
        if self.free(node_id) < len(ranks):
            return False
        taken: list[Place] = []
        for rank in ranks:
            index = next((i for i, device in enumerate(devices) if self._fits(device, rank)), None)
            if index is None:
                return False
            taken.append(Place(rank=rank, node_id=node_id, device_id=devices[index].device_id))
            devices[index] = self._less(devices[index], rank)
        self._devices[node_id] = devices
        self.places += taken
        return True

    def no_memory(self, rank: Rank) -> str:
        need = self._need(rank)
        largest = max(
            (device.free_bytes or 0 for devices in self._devices.values() for device in devices if device.slots),
            default=0,
        )
        return (
            f"job {self._spec.name!r}: rank {rank} needs {need:,} bytes, the largest free device has "
            f"{largest:,} bytes left. Cut the model into more stages or connect a larger device."
        )

    def _need(self, rank: Rank) -> int:
        return self._spec.bytes_per_rank[rank] if self._spec.bytes_per_rank else 0

    def _fits(self, device: DeviceOffer, rank: Rank) -> bool:
        return device.slots > 0 and (device.free_bytes is None or device.free_bytes >= self._need(rank))

    def _less(self, device: DeviceOffer, rank: Rank) -> DeviceOffer:
        left = None if device.free_bytes is None else device.free_bytes - self._need(rank)
        return DeviceOffer(device_id=device.device_id, kind=device.kind, slots=device.slots - 1, free_bytes=left)


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
