"""Which nodes there are, and which of them are here. Pure: no socket, no clock.

A node is judged by when the hub heard it, in the hub's monotonic seconds, never by the node's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from distensor.comm.messages import Heartbeat, HeartbeatAnswer, Rejected
from distensor.core.control import Earnings, Mesh, MeshNode, NodeInfo
from distensor.core.ids import AccountId, DeviceId, Generation, NodeId
from distensor.core.reading import Unavailable
from distensor.hub.effects import Disconnect, Effect, Note, SaveInfo, Send, SessionId, SpendToken
from distensor.hub.placement import DeviceOffer, NodeOffer, site_of
from distensor.hub.records import NodeRecord

NOTHING_EARNED = Earnings()
MOST_GONE_LISTED = 200

MOST_BEATS = 500.0
"""In a second, of all nodes together: beyond that each beats less often."""
LONGEST_BEAT = 20.0

Slot: TypeAlias = tuple[NodeId, DeviceId]


@dataclass(slots=True)
class _Node:
    """A node in memory."""

    record: NodeRecord
    gone_since: float
    session: SessionId | None = None
    heard_at: float | None = None
    answered: bool = False
    accepting: bool = True
    earnings: Earnings = NOTHING_EARNED
    silence: float = 0.0
    """After how many seconds without a heartbeat it is not available, by the interval that its welcome told it."""


class Membership:
    """All nodes of a hub. A node that does not beat for `silent_beats` times `heartbeat` seconds is not available; both
    are longer where there are so many nodes that their beats would be more than MOST_BEATS a second."""

    def __init__(
        self,
        *,
        generation: Generation,
        nodes: Iterable[NodeRecord],
        heartbeat: float,
        silent_beats: int,
        now: float,
    ) -> None:
        self._generation = generation
        self._heartbeat = heartbeat
        self._silent_beats = silent_beats
        self._nodes = {node.node_id: _Node(record=node, gone_since=now) for node in nodes}
        self._by_session: dict[SessionId, NodeId] = {}
        self.changes = 0
        """Rises whenever there may be more room for jobs than before."""

    @property
    def heartbeat(self) -> float:
        """How often a node that joins now is to beat, in seconds."""
        return max(self._heartbeat, min(len(self._nodes) / MOST_BEATS, LONGEST_BEAT))

    def record(self, node_id: NodeId) -> NodeRecord | None:
        node = self._nodes.get(node_id)
        return None if node is None else node.record

    def info(self, node_id: NodeId) -> NodeInfo:
        return self._nodes[node_id].record.info

    def node_of(self, session: SessionId) -> NodeId | None:
        return self._by_session.get(session)

    def session_of(self, node_id: NodeId) -> SessionId | None:
        return self._nodes[node_id].session

    def seconds_gone(self, node_id: NodeId, now: float) -> float:
        """How long the node has had no stream; 0 while it has one."""
        node = self._nodes[node_id]
        return now - node.gone_since if node.session is None else 0.0

    def add(self, record: NodeRecord, now: float) -> None:
        """A node that has just been admitted; its record is already committed."""
        known = self._nodes.get(record.node_id)
        if known is None:
            self._nodes[record.node_id] = _Node(record=record, gone_since=now)
        else:
            known.record = record

    def set_earnings(self, node_id: NodeId, earnings: Earnings) -> None:
        if node := self._nodes.get(node_id):
            node.earnings = earnings

    def join(self, session: SessionId, node_id: NodeId, info: NodeInfo, now: float) -> list[Effect]:
        """A node's stream is open. An older stream of the same node ends: the newer one wins."""
        node = self._nodes[node_id]
        effects: list[Effect] = []
        if node.session is not None:
            why = Rejected(code="replaced", reason="this node has connected again with the same credential")
            effects.append(Disconnect(session=node.session, why=why))
            del self._by_session[node.session]
        node.session, node.heard_at, node.answered, node.accepting = session, now, False, True
        node.silence = self.heartbeat * self._silent_beats
        self._by_session[session] = node_id
        return [*effects, *_describe(node, info), Note(text=f"node {info.name} ({node_id}) connected")]

    def leave(self, session: SessionId, now: float) -> list[Effect]:
        """The stream ended."""
        node_id = self._by_session.pop(session, None)
        if node_id is None:
            return []
        node = self._nodes[node_id]
        node.session, node.answered, node.gone_since = None, False, now
        return [Note(text=f"node {node.record.info.name} ({node_id}) disconnected")]

    def beat(self, session: SessionId, beat: Heartbeat, now: float, hub_time: float) -> list[Effect]:
        """A heartbeat, and its answer. The node counts as connected from the first answer on."""
        node_id = self._by_session.get(session)
        if node_id is None:
            return []
        node = self._nodes[node_id]
        effects: list[Effect] = [] if node.answered else [SpendToken(node=node.record)]
        self.changes += not node.answered or beat.info is not None or beat.accepting != node.accepting
        node.heard_at, node.answered, node.accepting = now, True, beat.accepting
        if beat.info is not None:
            effects += _describe(node, beat.info)
        answer = HeartbeatAnswer(
            sequence=beat.sequence,
            generation=self._generation,
            earnings=node.earnings,
            hub_time=hub_time,
        )
        return [*effects, Send(session=session, message=answer)]

    def drop_silent(self, now: float) -> list[Effect]:
        """End the streams on which nothing has been heard for twice the time that makes a node unavailable."""
        effects: list[Effect] = []
        for session, node_id in list(self._by_session.items()):
            node = self._nodes[node_id]
            heard = node.heard_at
            if heard is not None and now - heard >= 2 * node.silence:
                why = Rejected(code="silent", reason=f"no heartbeat for {now - heard:.0f} s")
                effects += [Disconnect(session=session, why=why), *self.leave(session, now)]
        return effects

    def offers(self, used: Mapping[Slot, int], now: float) -> list[NodeOffer]:
        """What the connected nodes offer beyond the slots that are `used`."""
        return [_offer(node, used) for node in self._nodes.values() if self._is_connected(node, now)]

    def away(self, now: float) -> int:
        """How many known nodes are not connected: after a restart of the hub, those that have yet to come back."""
        return sum(not self._is_connected(node, now) for node in self._nodes.values())

    def mesh(self, used: Counter[Slot], now: float, account: AccountId | None = None) -> Mesh:
        """Every connected node, and those that were heard of last among the others; of one account, or of all."""
        known = [node for node in self._nodes.values() if account in (None, node.record.account)]
        here = [node for node in known if self._is_connected(node, now)]
        gone = [node for node in known if not self._is_connected(node, now)]
        gone.sort(key=lambda node: node.gone_since, reverse=True)
        nodes = sorted([*here, *gone[:MOST_GONE_LISTED]], key=_by_name)
        return Mesh(generation=self._generation, nodes=tuple(self._seen(node, used, now) for node in nodes))

    def _seen(self, node: _Node, used: Counter[Slot], now: float) -> MeshNode:
        connected = self._is_connected(node, now)
        silent = Unavailable(reason="no heartbeat since the hub started")
        return MeshNode(
            info=replace(node.record.info, node_id=node.record.node_id),
            connected=connected,
            free_slots=_offer(node, used).slots if connected else 0,
            seconds_since_heartbeat=silent if node.heard_at is None else now - node.heard_at,
            confirmed_micro=node.earnings.confirmed_micro,
        )

    def _is_connected(self, node: _Node, now: float) -> bool:
        heard = node.heard_at is not None and now - node.heard_at < node.silence
        return node.session is not None and node.answered and heard


def _describe(node: _Node, info: NodeInfo) -> list[Effect]:
    seen = info.seen_host or node.record.info.seen_host
    info = replace(info, node_id=node.record.node_id, seen_host=seen)
    if info == node.record.info:
        return []
    node.record = replace(node.record, info=info)
    return [SaveInfo(node_id=node.record.node_id, info=info)]


def _by_name(node: _Node) -> tuple[str, NodeId]:
    return node.record.info.name, node.record.node_id


def _offer(node: _Node, used: Mapping[Slot, int]) -> NodeOffer:
    """What is left of the node's slots; nothing while it accepts no work."""
    node_id = node.record.node_id
    devices = tuple(
        DeviceOffer(
            device_id=device.device_id,
            kind=device.kind,
            slots=max(0, device.slots - used.get((node_id, device.device_id), 0)),
            free_bytes=None if isinstance(device.free_bytes, Unavailable) else device.free_bytes,
            flops=None if isinstance(device.matmul_flops, Unavailable) else device.matmul_flops,
        )
        for device in node.record.info.devices
        if device.unusable is None and node.accepting
    )
    return NodeOffer(
        node_id=node_id,
        name=node.record.info.name,
        devices=devices,
        site=site_of(node.record.info.seen_host),
        accepting=node.accepting,
    )
