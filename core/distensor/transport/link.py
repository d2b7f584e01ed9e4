"""The connections to one peer: a sender thread for one direction, a reader thread for the other."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distensor.core.clock import Clock
from distensor.core.errors import FrameError, PeerLostError, TransportTimeoutError
from distensor.transport.frames import FrameKind, encode_prefix
from distensor.transport.inbound import Inbound
from distensor.transport.local_lanes import Connection, LocalSocket
from distensor.transport.mailbox import Mailbox
from distensor.transport.rates import RateLimit
from distensor.transport.round_trips import RoundTrips, answering, question_in
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Buffer, FrameLimits, LinkStats, PathKind, Tag, peer_name
from distensor.transport.wire import WireReader, WireWriter, cut_off

_AT_ONCE_BELOW = 1 << 15
"""Messages up to this size may leave from the caller's thread; over a Unix socket, up to `LocalSocket.at_once`."""
_AT_ONCE_TLS = (1 << 17) + (1 << 10)
"""The same over TLS: to encrypt more is worth a thread of its own. What the kernel has no room for is the sender's."""
_GRACE_FOR_GOODBYE = 0.03
"""How long a failed send waits for a goodbye that may be on its way on the other connection."""


class SendHandle:
    """A message on its way out. Its buffers must not change before `wait` returns."""

    __slots__ = ("_done", "_error", "_event", "_lock", "_rank", "_tag")

    def __init__(self, rank: int, tag: Tag) -> None:
        self._done = False
        self._error: PeerLostError | None = None
        self._event: threading.Event | None = None
        self._lock = threading.Lock()
        self._rank = rank
        self._tag = tag

    def wait(self, timeout: float | None = None) -> None:
        """Return once the bytes are with the operating system.

        Raises:
            PeerLostError: the peer was lost before that.
            TransportTimeoutError: it took longer than `timeout`.
        """
        if not self._done and not self._waiting().wait(timeout):
            raise TransportTimeoutError(f"{self._tag} to {peer_name(self._rank)} was not sent within {timeout:g} s")
        if self._error is not None:
            raise self._error

    def _waiting(self) -> threading.Event:
        """Most handles are done before anybody waits: an event is made only when it is needed."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
                if self._done:
                    self._event.set()
            return self._event

    @property
    def done(self) -> bool:
        return self._done

    def finish(self, error: PeerLostError | None = None) -> None:
        with self._lock:
            self._error = error
            self._done = True
            if self._event is not None:
                self._event.set()


@dataclass(slots=True)
class _Outgoing:
    handle: SendHandle | None
    kind: FrameKind
    head: bytes = b""
    buffers: Sequence[memoryview] = ()
    answers: int | None = None
    """Of a keep-alive: the peer's number that it brings back; None asks for one of ours."""
    begun: bool = False
    """It is with the connection already, which has not been able to send all of it."""


OnLost = Callable[[int, str, bool], None]
"""Called with (rank, reason, said goodbye), from any thread, possibly more than once."""


@dataclass(slots=True, eq=False)
class PeerLink:
    """Everything about one connected peer."""

    rank: int
    epoch: int
    outbound: Connection
    inbound: Connection
    mailbox: Mailbox
    limits: FrameLimits
    on_lost: OnLost
    clock: Clock
    send_limit: RateLimit
    receive_limit: RateLimit
    path: PathKind | None = None
    """The way by which the peer was reached."""
    _trips: RoundTrips = field(init=False, default_factory=RoundTrips)
    _answering: bool = field(init=False, default=False)
    """An answer is queued: a peer that asks faster than we send gets no second one."""
    _writer: WireWriter = field(init=False)
    _reader: WireReader = field(init=False)
    inward: Inbound = field(init=False)
    """What reads; public so that who waits for a message can do it himself."""
    _queue: deque[_Outgoing] = field(init=False, default_factory=deque)
    _wake: threading.Condition = field(init=False, default_factory=threading.Condition)
    _ended: str | None = field(init=False, default=None)
    _sending: bool = field(init=False, default=False)
    _writing: threading.Lock = field(init=False, default_factory=threading.Lock)
    _writable: select.poll = field(init=False, default_factory=select.poll)
    _at_once: int = field(init=False, default=_AT_ONCE_BELOW)
    _threads: tuple[threading.Thread, threading.Thread] = field(init=False)

    def __post_init__(self) -> None:
        self._writer = WireWriter(self.outbound, self.epoch, self.send_limit)
        self._writable.register(self.outbound, select.POLLOUT)
        if isinstance(self.outbound, LocalSocket):
            self._at_once = max(_AT_ONCE_BELOW, self.outbound.at_once)
        elif isinstance(self.outbound, TlsSocket):
            self._at_once = _AT_ONCE_TLS
        self._reader = WireReader(self.inbound, self.epoch, self.limits, limit=self.receive_limit, clock=self.clock)
        self.inward = Inbound(
            self.rank, self.inbound, self._reader, self.mailbox, self.receive_limit, self.clock, self._heard_life
        )
        self._threads = (self._thread(self._send_loop, "to"), self._thread(self._read_loop, "from"))

    def _thread(self, run: Callable[[], None], direction: str) -> threading.Thread:
        return threading.Thread(target=run, name=f"distensor-{direction}-{peer_name(self.rank)}", daemon=True)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, tag: Tag, header: bytes, buffers: Sequence[Buffer]) -> SendHandle:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        body = sum(len(view) for view in views)
        if len(header) > self.limits.header or body > self.limits.body:
            raise FrameError(
                f"a message of {len(header)} header and {body} body bytes is over the limits of "
                f"{self.limits.header} and {self.limits.body}; send it in parts"
            )
        head = encode_prefix(FrameKind.DATA, self.epoch, tag, len(header), body) + header
        handle = SendHandle(self.rank, tag)
        item = _Outgoing(handle, FrameKind.DATA, head, views)
        if len(head) + body > self._at_once or not self._send_at_once(item):
            self._enqueue(item)
        elif not item.begun:
            handle.finish()
        return handle

    def _send_at_once(self, item: _Outgoing) -> bool:
        """Send a small message from the caller's thread if nothing is before it and there is room for it."""
        if not self._writing.acquire(blocking=False):
            return False
        try:
            if self._queue or self._ended is not None or self.send_limit.active or not self._writable.poll(0):
                return False
            if not isinstance(self.outbound, TlsSocket):
                self._writer.data(item.head, item.buffers)
            elif not self._writer.data_now(self.outbound, item.head, item.buffers):
                item.begun = True
                self._enqueue(item)
        except OSError as error:
            self._broke(error)
            return False
        finally:
            self._writing.release()
        return True

    def _broke(self, error: OSError) -> None:
        """Sending failed: the peer is lost, unless its goodbye is there or just coming."""
        self._threads[1].join(_GRACE_FOR_GOODBYE)
        self.on_lost(self.rank, f"sending failed: {error}", False)

    def keep_alive(self) -> None:
        """Say that we are there, unless something is on its way anyway."""
        with self._wake:
            if not self._queue and not self._sending and self._ended is None:
                self._queue.append(_Outgoing(None, FrameKind.KEEP_ALIVE))
                self._wake.notify()

    def say_goodbye(self) -> None:
        with self._wake:
            if self._ended is None:
                self._queue.append(_Outgoing(None, FrameKind.GOODBYE))
                self._wake.notify()

    def _enqueue(self, item: _Outgoing) -> None:
        with self._wake:
            if self._ended is not None:
                raise PeerLostError(self.rank, self._ended)
            self._queue.append(item)
            self._wake.notify()

    @property
    def sending(self) -> bool:
        return self._sending

    @property
    def holding(self) -> bool:
        """It is us who do not read at the moment: too much of it is unread, or our own cap is used up."""
        return self._reader.waiting or self.mailbox.holds(self.rank)

    @property
    def stats(self) -> LinkStats:
        return LinkStats(
            bytes_sent=self._writer.bytes_sent,
            bytes_received=self._reader.bytes_received,
            messages_sent=self._writer.messages_sent,
            messages_received=self._reader.messages_received,
            rtt_seconds=self._trips.shortest,
            rtt_at=self._trips.last_at,
            path=self.path,
            receive_rate=self._reader.rate,
            local=isinstance(self.outbound, LocalSocket) and isinstance(self.inbound, LocalSocket),
        )

    def end(self, reason: str) -> None:
        """Stop both directions; what is still queued fails."""
        with self._wake:
            if self._ended is None:
                self._ended = reason
            self._wake.notify()
        cut_off(self.outbound)
        cut_off(self.inbound)

    def join_sender(self, timeout: float) -> None:
        self._threads[0].join(timeout)

    def join(self, timeout: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._ended is not None)
            return self._ended is None

    def _send_loop(self) -> None:
        item: _Outgoing | None = None
        try:
            while (item is None or item.kind is not FrameKind.GOODBYE) and self._wait_for_work():
                with self._writing:
                    # Taken off the queue under the lock, so that nobody overtakes it.
                    item = self._queue.popleft()
                    self._sending = True
                    self._send_one(item)
                    self._sending = False
        except OSError as error:
            self._broke(error)
        finally:
            self._fail_queued(item)
            with self._writing:
                self.outbound.close()

    def _send_one(self, item: _Outgoing) -> None:
        if item.begun and isinstance(self.outbound, TlsSocket):
            self.outbound.flush()
        elif item.kind is FrameKind.DATA:
            self._writer.data(item.head, item.buffers)
        elif item.kind is FrameKind.KEEP_ALIVE:
            self._signal_life(item.answers)
        else:
            self._writer.signal(item.kind)
        if item.handle is not None:
            item.handle.finish()

    def _signal_life(self, answers: int | None) -> None:
        if answers is None:
            self._writer.signal(FrameKind.KEEP_ALIVE, tag=self._trips.ask(self.clock.monotonic()))
        else:
            self._answering = False
            self._writer.signal(FrameKind.KEEP_ALIVE, tag=answering(answers))

    def _fail_queued(self, current: _Outgoing | None) -> None:
        with self._wake:
            if self._ended is None:
                self._ended = "the connection was closed here"
            left = [*([] if current is None else [current]), *self._queue]
            self._queue.clear()
        for item in left:
            if item.handle is not None and not item.handle.done:
                item.handle.finish(PeerLostError(self.rank, self._ended))

    def _read_loop(self) -> None:
        reason, goodbye = "the reader of its messages failed", False
        try:
            reason, goodbye = self.inward.run()
        finally:
            self.on_lost(self.rank, reason, goodbye)
            self.inbound.close()

    def _heard_life(self, tag: Tag) -> None:
        self._trips.heard(tag, self.clock.monotonic())
        number = question_in(tag)
        if number is None:
            return
        with self._wake:
            if not self._answering and self._ended is None:
                self._answering = True
                self._queue.append(_Outgoing(None, FrameKind.KEEP_ALIVE, answers=number))
                self._wake.notify()
