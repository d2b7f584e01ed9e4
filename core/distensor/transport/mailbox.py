"""Queues of received messages, one per (peer, tag), and the threads that wait on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.errors import PeerLostError, TransportTimeoutError
from distensor.transport.types import Channel, Message, Tag, peer_name

Key = tuple[int, Tag]
Arrival = tuple[int, Tag, Message]
Read = Callable[[Callable[[], bool], float | None], None]
"""Called by who is about to wait, with 'is it over?' and the seconds that he would wait."""


def _nobody_reads(_over: Callable[[], bool], _timeout: float | None) -> None:
    """The connection's own thread brings it."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A thread asleep until its message arrives or a peer it depends on is lost."""

    concerns: Callable[[int], bool]
    woken: threading.Lock = field(default_factory=threading.Lock)
    arrival: Arrival | None = None
    lost: PeerLostError | None = None

    def __post_init__(self) -> None:
        self.woken.acquire()

    def wake(self) -> None:
        self.woken.release()

    def over(self) -> bool:
        return self.arrival is not None or self.lost is not None


@dataclass(slots=True, eq=False, kw_only=True)
class _AnyWaiter(_Waiter):
    """One that takes what it wants of several peers and tags."""

    wants: Callable[[int, Tag], bool]


class Mailbox:
    """Messages in, messages out; a lost peer wakes every waiter that needs it."""

    def __init__(self, *, queued_limit: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._queued_limit = queued_limit
        self._clock = clock
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._held: set[int] = set()
        self._queues: dict[Key, deque[Message]] = {}
        self._queued_bytes: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        self._exact: dict[Key, deque[_Waiter]] = {}
        self._open: list[_AnyWaiter] = []

    def offer(self, peer: int, tag: Tag, message: Message) -> bool:
        """`put` for whoever may not wait; False where there is no room."""
        with self._lock:
            waiter = self._take_waiter(peer, tag)
            if waiter is not None:
                waiter.arrival = (peer, tag, message)
                waiter.wake()
            elif self._fits(peer, message):
                self._enqueue(peer, tag, message)
            else:
                return False
            return True

    def waited_for(self, peer: int) -> bool:
        """Whether a thread waits for a message that `peer` may send."""
        with self._lock:
            return bool(self._open) or any(key[0] == peer for key in self._exact)

    def put(self, peer: int, tag: Tag, message: Message) -> None:
        """Deliver a message, to a waiting thread or into its queue.

        Blocks while `peer` has more unread messages here than the limit allows: the caller then reads no more from it,
        and the peer cannot send. The message that somebody waits for always gets through.
        """
        with self._lock:
            while (waiter := self._take_waiter(peer, tag)) is None and not self._fits(peer, message):
                self._held.add(peer)
                self._room.wait()
            self._held.discard(peer)
            if waiter is None:
                self._enqueue(peer, tag, message)
                return
            waiter.arrival = (peer, tag, message)
            waiter.wake()

    def holds(self, peer: int) -> bool:
        """Whether `put` is blocked on a message of `peer`."""
        with self._lock:
            return peer in self._held

    def _fits(self, peer: int, message: Message) -> bool:
        queued = self._queued_bytes.get(peer, 0)
        return queued == 0 or queued + _size(message) <= self._queued_limit or peer in self._lost

    def _take_waiter(self, peer: int, tag: Tag) -> _Waiter | None:
        exact = self._exact.get((peer, tag))
        if exact:
            waiter = exact.popleft()
            if not exact:
                del self._exact[peer, tag]
            return waiter
        for index, candidate in enumerate(self._open):
            if candidate.wants(peer, tag):
                return self._open.pop(index)
        return None

    def _enqueue(self, peer: int, tag: Tag, message: Message) -> None:
        self._queued_bytes[peer] = self._queued_bytes.get(peer, 0) + _size(message)
        self._queues.setdefault((peer, tag), deque()).append(message)

    def _tell_held(self) -> None:
        """Something changed that may let a blocked `put` go on."""
        if self._held:
            self._room.notify_all()

    def get(
        self, peer: int, tag: Tag, timeout: float | None, needed: Collection[int] = (), read: Read = _nobody_reads
    ) -> Message:
        """The next message of `peer` with `tag`; the loss of any of `needed` ends the wait too.

        `read` is called once before the wait, and may itself put the message here.
        """
        key = (peer, tag)
        with self._lock:
            if key in self._queues:
                return self._dequeue(key)
            for each in (peer, *needed):
                self._raise_if_lost(each)
            waiter = _Waiter(concerns=lambda lost: lost == peer or lost in needed)
            self._exact.setdefault(key, deque()).append(waiter)
            self._tell_held()
        return self._await(waiter, timeout, read, f"{peer_name(peer)} to send {tag}")[2]

    def poll(self, peer: int, tag: Tag) -> Message | None:
        """The next message of `peer` with `tag` if it is there."""
        with self._lock:
            return self._dequeue((peer, tag)) if (peer, tag) in self._queues else None

    def has(self, peer: int, tag: Tag) -> bool:
        with self._lock:
            return (peer, tag) in self._queues

    def get_any(
        self, channel: Channel, timeout: float | None, peers: Collection[int] | None, read: Read = _nobody_reads
    ) -> Arrival:
        """The oldest message on `channel` of any of `peers` (None: of all). `read` is called as by `get`."""

        def concerns(peer: int) -> bool:
            return peers is None or peer in peers

        def wants(peer: int, tag: Tag) -> bool:
            return tag.channel == channel and concerns(peer)

        with self._lock:
            for key in self._queues:
                if wants(*key):
                    return (*key, self._dequeue(key))
            for peer in self._lost:
                if concerns(peer):
                    self._raise_if_lost(peer)
            waiter = _AnyWaiter(wants=wants, concerns=concerns)
            self._open.append(waiter)
            self._tell_held()
        return self._await(waiter, timeout, read, f"a message on {channel.name.lower()}")

    def _dequeue(self, key: Key) -> Message:
        queue = self._queues[key]
        message = queue.popleft()
        if not queue:
            del self._queues[key]
        self._queued_bytes[key[0]] -= _size(message)
        self._tell_held()
        return message

    def _await(self, waiter: _Waiter, timeout: float | None, read: Read, what: str) -> Arrival:
        """Let the caller read for himself, and wait; both together for `timeout` seconds."""
        until = None if timeout is None else self._clock.monotonic() + timeout
        read(waiter.over, timeout)
        woken = waiter.woken.acquire(timeout=-1 if until is None else max(until - self._clock.monotonic(), 0.0))
        if not woken:
            with self._lock:
                self._forget(waiter)
        if waiter.arrival is not None:
            return waiter.arrival
        if waiter.lost is not None:
            raise waiter.lost
        raise TransportTimeoutError(f"waited {timeout:g} s for {what}; nothing came")

    def _forget(self, waiter: _Waiter) -> None:
        if isinstance(waiter, _AnyWaiter) and waiter in self._open:
            self._open.remove(waiter)
        for key, waiters in list(self._exact.items()):
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._exact[key]

    def fail(self, peer: int, reason: str) -> bool:
        """Record that `peer` is lost and wake who waits for it. False when it was lost already."""
        with self._lock:
            if peer in self._lost:
                return False
            self._lost[peer] = reason
            self._tell_held()
            waiters: list[_Waiter] = [*self._open, *(waiter for queue in self._exact.values() for waiter in queue)]
            for waiter in waiters:
                if waiter.concerns(peer):
                    self._forget(waiter)
                    waiter.lost = PeerLostError(peer, reason)
                    waiter.wake()
            return True

    def lost(self) -> Mapping[int, str]:
        with self._lock:
            return dict(self._lost)

    def check(self, peer: int) -> None:
        """Raise PeerLostError if `peer` is lost."""
        with self._lock:
            self._raise_if_lost(peer)

    def _raise_if_lost(self, peer: int) -> None:
        reason = self._lost.get(peer)
        if reason is not None:
            raise PeerLostError(peer, reason)


def _size(message: Message) -> int:
    return len(message.header) + len(message.body)
