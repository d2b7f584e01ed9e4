"""`DataPlane`: one process's connections to all its peers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.errors import PeerLostError, TransportError, TransportTimeoutError
from distensor.core.ids import DRIVER_RANK
from distensor.transport.acceptor import Acceptor
from distensor.transport.dialer import Dialer
from distensor.transport.handshake import Lane
from distensor.transport.identity import client_context, server_context
from distensor.transport.keeper import Keeper
from distensor.transport.lanes import LaneTable
from distensor.transport.link import PeerLink, SendHandle
from distensor.transport.listener import Listener
from distensor.transport.local_lanes import Connection, LocalMeeting
from distensor.transport.mailbox import Mailbox
from distensor.transport.rates import RateLimit
from distensor.transport.relayed import Parking
from distensor.transport.types import (
    Address,
    Buffer,
    Channel,
    Credentials,
    FrameLimits,
    LinkStats,
    Message,
    PathKind,
    PeerId,
    Peers,
    Tag,
    Timeouts,
    peer_name,
    places_of,
)

_CLOSED_HERE = "the data plane was closed here"
_JOIN = 5.0


class DataPlane:
    """Messages to and from peers, by rank and tag. Safe for any number of threads."""

    def __init__(self, me: PeerId, *, timeouts: Timeouts, limits: FrameLimits, clock: Clock) -> None:
        self.me = me
        self.timeouts = timeouts
        self._limits = limits
        self._clock = clock
        self._send_limit, self._receive_limit = RateLimit(clock), RateLimit(clock)
        self._mailbox = Mailbox(queued_limit=limits.queued)
        self._links: dict[int, PeerLink] = {}
        self._changed = threading.Condition()
        self._failure: TransportError | None = None
        self._departed: set[int] = set()
        self._closing = threading.Event()
        self._lanes = LaneTable(self._add_link)
        self._acceptor: Acceptor | None = None
        self._parking: Parking | None = None
        self._paths: dict[int, PathKind] = {}
        self._dialers: list[Dialer] = []
        self._threads: list[threading.Thread] = []

    @classmethod
    def open(
        cls,
        me: PeerId,
        credentials: Credentials,
        listener: Listener | None,
        peers: Peers,
        *,
        timeouts: Timeouts | None = None,
        limits: FrameLimits | None = None,
        clock: Clock = SYSTEM_CLOCK,
        driver: bool = True,
        relay: Address | None = None,
        local: LocalMeeting | None = None,
        on_opening: Callable[[DataPlane], None] = lambda _plane: None,
        awaits: Collection[int] | None = None,
    ) -> DataPlane:
        """Connect to everybody and return when all are there.

        A rank dials every peer above it and is dialed by those below and by the driver; the driver dials all.
        `driver=False` is for a mesh without one. With `local`, peers that are processes of the same user on this
        machine, and have it too, are met on Unix sockets once TLS has proven them. Peers that no address leads to are
        met at the `relay`, where there is one. The listener stays the caller's; it is watched until `close`.
        `on_opening` gets the plane before anybody is met, so that another thread can `close` it and end the waiting.
        `awaits` are those that have to be there (None: all); the others may come later, or never.

        Raises:
            HandshakeError: a peer is not who it should be, or refuses us.
            TransportTimeoutError: somebody is not there after `timeouts.connect` seconds.
            TransportError: the plane was closed meanwhile.
            PeerLostError: a peer went away again meanwhile.
        """
        plane = cls(me, timeouts=timeouts or Timeouts(), limits=limits or FrameLimits(), clock=clock)
        with ExitStack() as undo:
            undo.callback(plane.close)
            on_opening(plane)
            plane._meet(credentials, listener, peers, driver, local, relay, awaits)
            undo.pop_all()
        return plane

    # -- messages ----------------------------------------------------------------------------------------------

    def send(self, peer: int, tag: Tag, header: bytes = b"", buffers: Sequence[Buffer] = ()) -> SendHandle:
        """Queue a message. `buffers` are sent as they are, one after the other; leave them unchanged until the handle
        says so.

        Raises:
            PeerLostError: the peer is lost.
        """
        self._mailbox.check(peer)
        return self._link(peer).send(tag, header, buffers)

    def recv(self, peer: int, tag: Tag, timeout: float | None = None, *, needed: Collection[int] = ()) -> Message:
        """The next message with exactly this tag. Messages that arrived before a peer was lost can still be taken.

        Raises:
            PeerLostError: no such message is there, and the peer, or one of those `needed` for it to come, is lost.
            TransportTimeoutError: nothing came within `timeout` seconds (None: wait as long as the peer lives).
        """
        return self._mailbox.get(peer, tag, timeout, needed, self._link(peer).inward.take_for)

    def poll(self, peer: int, tag: Tag) -> Message | None:
        """Like `recv`, where the message is there already; None otherwise."""
        return self._mailbox.poll(peer, tag)

    def has(self, peer: int, tag: Tag) -> bool:
        """Whether `recv` would return a message at once."""
        return self._mailbox.has(peer, tag)

    def recv_any(
        self, channel: Channel, timeout: float | None = None, *, peers: Collection[int] | None = None
    ) -> tuple[int, Tag, Message]:
        """The oldest message on a channel, whoever sent it.

        Raises:
            PeerLostError: nothing is there and one of `peers` (None: of all) is lost.
            TransportTimeoutError: nothing came within `timeout` seconds.
        """

        def hurry(_over: Callable[[], bool], _timeout: float | None) -> None:
            for rank, link in self._links.items():
                if peers is None or rank in peers:
                    link.inward.hurry()

        return self._mailbox.get_any(channel, timeout, peers, hurry)

    # -- the state of the links --------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    @property
    def peers(self) -> frozenset[int]:
        return frozenset(self._links)

    def limit_rates(self, *, send: float | None, receive: float | None) -> None:
        """Cap what all links together send and receive from now on, in bytes per second; None for no cap."""
        self._send_limit.set_rate(send)
        self._receive_limit.set_rate(receive)

    def stats(self) -> dict[int, LinkStats]:
        """Bytes and messages per peer, counted where they enter and leave the sockets."""
        return {rank: link.stats for rank, link in self._links.items()}

    def lost(self) -> Mapping[int, str]:
        """Lost peers and why; those that said goodbye are among them."""
        return self._mailbox.lost()

    def departed(self) -> frozenset[int]:
        """The lost peers that closed in good order."""
        with self._changed:
            return frozenset(self._departed)

    def check(self, peer: int) -> None:
        """Raise PeerLostError if `peer` is lost."""
        self._mailbox.check(peer)

    def close(self) -> None:
        """Say goodbye, let queued messages leave for up to `timeouts.goodbye` seconds, and end every thread."""
        self._closing.set()
        self._fail(TransportError(_CLOSED_HERE))
        if self._parking is not None:
            self._parking.stop()
        if self._acceptor is not None:
            self._acceptor.stop()
        for dialer in self._dialers:
            dialer.interrupt()
        for link in self._links.values():
            link.say_goodbye()
        deadline = self._clock.monotonic() + self.timeouts.goodbye
        for link in self._links.values():
            link.join_sender(max(0.0, deadline - self._clock.monotonic()))
        for rank in list(self._links):
            self._lose(rank, _CLOSED_HERE, False)
        for link in self._links.values():
            link.join(_JOIN)
        for thread in self._threads:
            thread.join(_JOIN)
        if self._parking is not None:
            self._parking.join(_JOIN)
        self._lanes.close()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _link(self, peer: int) -> PeerLink:
        try:
            return self._links[peer]
        except KeyError:
            known = ", ".join(peer_name(rank) for rank in sorted(self._links))
            raise TransportError(
                f"{peer_name(peer)} is no peer of {peer_name(self.me.rank)}; connected: {known or 'nobody'}"
            ) from None

    # -- meeting -----------------------------------------------------------------------------------------------

    def _meet(
        self,
        credentials: Credentials,
        listener: Listener | None,
        peers: Peers,
        driver: bool,
        local: LocalMeeting | None,
        relay: Address | None,
        awaits: Collection[int] | None,
    ) -> None:
        if self._closing.is_set():
            raise TransportError(_CLOSED_HERE)
        dialed = {rank: places_of(where) for rank, where in peers.items() if rank > self.me.rank}
        awaited = {rank for rank in peers if DRIVER_RANK < rank < self.me.rank}
        if driver and self.me.rank != DRIVER_RANK:
            awaited.add(DRIVER_RANK)
        deadline = self._clock.monotonic() + self.timeouts.connect
        self._lanes.expect({*dialed, *awaited})
        if listener is not None:
            self._listen(listener, credentials, frozenset(awaited), local)
        if relay is not None and self._acceptor is not None and awaited:
            acceptor, lanes = self._acceptor, self._lanes
            self._parking = Parking(relay, credentials, self.me.rank, acceptor.take_relayed, lanes.wants_more)
            self._parking.start()
        context = client_context(credentials, self._clock)
        for rank, places in dialed.items():
            self._dial(
                Dialer(self.me, rank, places, context, deadline, self._clock, self._closing, local, relay, credentials)
            )
        keeper = Keeper(lambda: self._links, self.timeouts, self._lose, self._closing)
        self._spawn("keeper", keeper.run)
        self._await({*dialed, *awaited} if awaits is None else set(awaits), deadline)
        if self._parking is not None and awaits is None:
            self._parking.stop()  # everybody is here: a relay keeps places for those who are not

    def _listen(
        self, listener: Listener, credentials: Credentials, awaited: frozenset[int], local: LocalMeeting | None
    ) -> None:
        context = server_context(credentials, self._clock)
        self._acceptor = Acceptor(
            listener, context, self.me, awaited, self.timeouts, self._clock, self._lanes, local, self._note_path
        )
        self._acceptor.start()

    def _dial(self, dialer: Dialer) -> None:
        def run() -> None:
            try:
                for lane in Lane:
                    connection = dialer.lane(lane)
                    if connection is None:
                        return
                    if dialer.path is not None:
                        self._note_path(dialer.rank, dialer.path)
                    self._lanes.add(dialer.rank, lane, connection, dialed=True)
            except TransportError as error:
                self._fail(error)

        self._dialers.append(dialer)
        self._spawn(f"dial-{dialer.rank}", run)

    def _spawn(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"distensor-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note_path(self, rank: int, path: PathKind) -> None:
        """By which way a peer came; known before its lanes are."""
        self._paths[rank] = path

    def _add_link(self, rank: int, outbound: Connection, inbound: Connection) -> None:
        link = PeerLink(
            rank,
            self.me.epoch,
            outbound,
            inbound,
            self._mailbox,
            self._limits,
            self._lose,
            self._clock,
            self._send_limit,
            self._receive_limit,
            path=self._paths.get(rank),
        )
        with self._changed:
            self._links = {**self._links, rank: link}
            link.start()
            self._changed.notify_all()

    def _fail(self, error: TransportError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _lose(self, rank: int, reason: str, goodbye: bool) -> None:
        with self._changed:
            if self._mailbox.fail(rank, reason) and goodbye:
                self._departed.add(rank)
            self._changed.notify_all()
        self._links[rank].end(reason)

    def _await(self, wanted: set[int], deadline: float) -> None:
        with self._changed:
            while (missing := wanted - self._links.keys()) and self._failure is None and not self._mailbox.lost():
                remaining = deadline - self._clock.monotonic()
                if remaining <= 0:
                    raise TransportTimeoutError(self._describe_missing(missing))
                self._changed.wait(remaining)
            if missing and self._failure is not None:
                raise self._failure
            for rank, reason in self._mailbox.lost().items():
                raise PeerLostError(rank, reason)

    def _describe_missing(self, missing: set[int]) -> str:
        told = {dialer.rank: f"{dialer} ({dialer.reason})" for dialer in self._dialers}
        names = ", ".join(told.get(rank, f"{peer_name(rank)} (did not dial)") for rank in sorted(missing))
        refused = list(self._acceptor.refused) if self._acceptor is not None else []
        if self._parking is not None and self._parking.reason:
            refused.append(self._parking.reason)
        detail = f"; turned away here: {'; '.join(refused[-3:])}" if refused else ""
        here = f"{len(self._links)} of {len(self._links) + len(missing)} expected peers are here"
        return f"not connected after {self.timeouts.connect:g} s: {names}; {here}{detail}"
