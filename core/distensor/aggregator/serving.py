"""An aggregator at work on the data plane of one epoch of a job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from distensor.aggregator.rounds import Deliver, Rounds
from distensor.aggregator.words import Kind, read_hello, read_set, tag, write_set
from distensor.core.clock import Clock
from distensor.core.errors import FrameError, PeerLostError, TransportError, TransportTimeoutError
from distensor.transport import (
    Address,
    Channel,
    Credentials,
    DataPlane,
    FrameLimits,
    Listener,
    LocalMeeting,
    Message,
    PeerId,
    Tag,
    Timeouts,
)
from distensor.transport.types import Peers

LOOK_EVERY = 0.1
"""Seconds after which losses and patience are looked at, where nothing comes."""
MESSAGE_BYTES = 256 << 20
MOST_AGGREGATORS = 64
"""Of a job."""
MEET_SECONDS = 30.0
"""How long the aggregator of another site may take to be there."""


def open_plane(
    me: PeerId,
    credentials: Credentials,
    listener: Listener,
    peers: Peers,
    *,
    clock: Clock,
    relay: Address | None = None,
    message_bytes: int = MESSAGE_BYTES,
    timeouts: Timeouts | None = None,
) -> DataPlane:
    """The plane of an aggregator: it listens, whoever wants it comes. `peers` are all other places of the epoch.

    Raises:
        HandshakeError: our own credentials cannot be used.
    """
    return DataPlane.open(
        me=me,
        credentials=credentials,
        listener=listener,
        peers=peers,
        timeouts=timeouts,
        limits=aggregator_limits(message_bytes),
        clock=clock,
        driver=False,
        relay=relay,
        local=LocalMeeting(),
        awaits=(),
    )


def aggregator_limits(message_bytes: int = MESSAGE_BYTES) -> FrameLimits:
    """What one peer may make an aggregator hold: a message, and another one that nobody has asked for yet."""
    return FrameLimits(header=1 << 20, body=message_bytes, queued=2 * message_bytes)


@dataclass(slots=True)
class Serving:
    """Takes and delivers until every member is gone.

    Args:
        members: the ranks that are served: those of the mesh, from 0.
        most_bytes: that may pass, in and out together; with more the plane is closed.
        on_round: told after each message that came.
    """

    plane: DataPlane
    clock: Clock
    members: frozenset[int]
    most_bytes: int | None = None
    on_round: Callable[[], None] = lambda: None
    passed: int = 0
    _groups: dict[int, Rounds] = field(default_factory=dict)
    _early: list[tuple[int, Tag, Message]] = field(default_factory=list)
    _lost: set[int] = field(default_factory=set)
    _unmet: list[tuple[float, Rounds, Deliver]] = field(default_factory=list)

    def run(self) -> None:
        """Raises TransportError: a peer sent what does not belong, or the job has used its bytes."""
        while not self.members <= self._lost and not self.plane.closed:
            try:
                places = frozenset(range(len(self.members) + MOST_AGGREGATORS)) - self._lost
                sender, found, message = self.plane.recv_any(Channel.AGGREGATE, LOOK_EVERY, peers=places)
            except (TransportTimeoutError, PeerLostError):
                self._look()
                continue
            self._count(len(message.body))
            self._take(sender, found, message)
            self.on_round()
            self._look()

    def _take(self, sender: int, found: Tag, message: Message) -> None:
        if found.micro == Kind.HELLO:
            self._greet(sender, found.slot, message.header)
            return
        rounds = self._groups.get(found.slot)
        if rounds is None and sender not in self.members:
            self._early.append((sender, found, message))  # another site was faster than our own
            return
        if rounds is None:
            raise FrameError(f"rank {sender} sends of group {found.slot} without a hello")
        self._send(rounds, self._event(rounds, sender, found, message))

    def _event(self, rounds: Rounds, sender: int, found: Tag, message: Message) -> list[Deliver]:
        if found.micro == Kind.UPDATE:
            return rounds.contribute(sender, found.step, message.body, self.clock.monotonic())
        if found.micro == Kind.SET:
            return rounds.site_set(sender, found.step, read_set(rounds.hello.group, message))
        raise FrameError(f"rank {sender} sends {found}; expected an update or a set")

    def _greet(self, sender: int, slot: int, text: bytes) -> None:
        hello = read_hello(text, sender)
        known = self._groups.get(slot)
        if hello.slot != slot or not set(hello.group) <= self.members or (known and known.hello != hello):
            raise FrameError(
                f"rank {sender} speaks of group {hello.group[:8]} in slot {slot}: others say something else"
            )
        if known is not None:
            return
        rounds = self._groups[slot] = Rounds(hello)
        for rank in self._lost & {*hello.site, *hello.others}:
            self._send(rounds, rounds.lose(rank))
        waiting, self._early = self._early, []
        for item in waiting:
            self._take(*item)

    def _look(self) -> None:
        now = self.clock.monotonic()
        unmet, self._unmet = self._unmet, []
        late = {each.to for since, _, each in unmet if now - since > MEET_SECONDS}
        for since, rounds, each in unmet:
            self._send_one(rounds, each, since)
        new = (self.plane.lost().keys() | late) - self._lost
        self._lost |= new
        for rounds in self._groups.values():
            for rank in new:
                self._send(rounds, rounds.lose(rank))
            self._send(rounds, rounds.tick(now))

    def _send(self, rounds: Rounds, deliveries: list[Deliver]) -> None:
        for each in deliveries:
            self._send_one(rounds, each, self.clock.monotonic())

    def _send_one(self, rounds: Rounds, each: Deliver, since: float) -> None:
        if each.to not in self.plane.peers:  # the aggregator of another site, which is not met yet
            self._unmet += [] if each.to in self._lost else [(since, rounds, each)]
            return
        header, body = write_set(rounds.hello.group, each.found, leave_out=each.to)
        self._count(sum(map(len, body)))
        with suppress(PeerLostError):  # `_look` will find it
            self.plane.send(each.to, tag(Kind.SET, each.number, rounds.hello.slot), header, body)

    def _count(self, size: int) -> None:
        self.passed += size
        if self.most_bytes is not None and self.passed > self.most_bytes:
            raise TransportError(f"the job has used its {self.most_bytes} bytes at this aggregator")
