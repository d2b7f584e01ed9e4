"""A TCP forwarder with the rate, delay and loss of access lines: for systems where a namespace is not to be had.

What it cannot do: TCP ends at the forwarder, so a lost packet shows as the delay that sending it again costs (one round
trip), and the algorithm that finds the rate of a real link has nothing to find.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import deque
from dataclasses import dataclass

from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.testing.homenet.profiles import Profile

_PACKET = 1448
_PIECE = 4 * _PACKET
_QUEUE = 256
"""Pieces that are on their way at once in one direction: a window of 1.5 MB."""


@dataclass(slots=True, kw_only=True)
class _Way:
    """One direction of all connections: the sender's rate up, then the receiver's down, then the delay of both."""

    rate: float
    delay: float
    loss: float
    again: float
    chance: random.Random
    free_at: float = 0.0
    arrived_at: float = 0.0
    carried: int = 0

    def offer(self, now: float, size: int) -> float:
        """When these bytes arrive. What is lost is sent again, and holds up what follows it: TCP keeps the order."""
        self.free_at = max(now, self.free_at) + size / self.rate
        packets = -(-size // _PACKET)
        lost = sum(self.chance.random() < self.loss for _ in range(packets))
        self.arrived_at = max(self.arrived_at, self.free_at + self.delay + (self.again if lost else 0.0))
        self.carried += size
        return self.arrived_at


class DelayLine:
    """Listens on a port of this machine; what connects to it reaches `target` as from one host to another.

    Both hosts have `profile`. Use as a context manager; `address` is where to connect.
    """

    def __init__(
        self,
        target: tuple[str, int],
        profile: Profile,
        *,
        host: str = "127.0.0.1",
        seed: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target = target
        self._clock = clock
        chance = random.Random(seed)  # noqa: S311 - which bytes are late is to be the same in each run
        self._ways = tuple(
            _Way(
                rate=min(profile.up, profile.down),
                delay=profile.rtt / 2,
                loss=profile.loss,
                again=profile.rtt,
                chance=chance,
            )
            for _ in range(2)
        )
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._threads = [threading.Thread(target=self._accept, name="delay-line", daemon=True)]
        self._threads[0].start()

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes so far, (towards the target, back)."""
        there, back = self._ways
        return there.carried, back.carried

    def _accept(self) -> None:
        while True:
            try:
                inside, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                outside = socket.create_connection(self._target, timeout=5)
            except OSError:
                inside.close()
                continue
            outside.settimeout(None)
            self._join(inside, outside)

    def _join(self, inside: socket.socket, outside: socket.socket) -> None:
        with self._lock:
            if self._closed:
                inside.close()
                outside.close()
                return
            self._sockets |= {inside, outside}
        there, back = self._ways
        for source, sink, way in ((inside, outside, there), (outside, inside, back)):
            for end in (source, sink):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(_Pipe(source=source, sink=sink, way=way, lock=self._lock, clock=self._clock))

    def _start(self, pipe: _Pipe) -> None:
        for run in (pipe.read, pipe.write):
            thread = threading.Thread(target=run, name="delay-line", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End all connections and every thread."""
        with self._lock:
            self._closed = True
            ends, self._sockets = self._sockets, set()
        _cut(self._listener)
        for end in ends:
            _cut(end)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for end in ends:
            end.close()

    def __enter__(self) -> DelayLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self, *, source: socket.socket, sink: socket.socket, way: _Way, lock: threading.Lock, clock: Clock
    ) -> None:
        self._source, self._sink, self._way, self._lock, self._clock = source, sink, way, lock, clock
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()

    def read(self) -> None:
        data = b"start"
        while data:
            try:
                data = self._source.recv(_PIECE)
            except OSError:
                data = b""
            with self._lock:
                due = self._way.offer(self._clock.monotonic(), len(data))
            with self._changed:
                self._changed.wait_for(lambda: len(self._pieces) < _QUEUE)
                self._pieces.append((due, data))
                self._changed.notify_all()

    def write(self) -> None:
        """Deliver in order, each piece at its time; an empty one is the end."""
        alive = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._pieces))
                due, data = self._pieces[0]
            if alive and (left := due - self._clock.monotonic()) > 0:
                self._clock.sleep(left)
            with self._changed:
                self._pieces.popleft()
                self._changed.notify_all()
            if not data:
                break
            alive = alive and self._send(data)
        _cut(self._sink, how=socket.SHUT_WR)

    def _send(self, data: bytes) -> bool:
        try:
            self._sink.sendall(data)
        except OSError:
            _cut(self._source)
            return False
        return True


def _cut(end: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    try:
        end.shutdown(how)
    except OSError:
        return  # it has ended already
