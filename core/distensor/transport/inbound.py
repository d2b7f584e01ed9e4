"""What comes from one peer: read by a thread of its own, or by the very thread that waits for it.

To hand a message from one thread to another costs more than to read it: two switches between threads, each through the
interpreter's lock. So whoever waits for a message of a peer first looks for a moment himself, and reads what comes, his
own message or another's. The thread of the connection meanwhile keeps its hands off. It reads whenever nobody waits, or
nothing came in that moment; so a silent peer, keep-alives and unasked messages need nobody who waits.

Nobody blocks inside a frame: a read that finds nothing leaves the frame where it is, for whoever reads next.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from distensor.core.clock import Clock
from distensor.core.errors import FrameError
from distensor.transport.frames import FrameKind, Prefix
from distensor.transport.local_lanes import Connection
from distensor.transport.mailbox import Mailbox
from distensor.transport.rates import RateLimit
from distensor.transport.types import Buffer, Message, NothingYetError, Tag
from distensor.transport.wire import WireReader

GOODBYE_REASON = "it closed the connection with a goodbye"
_PATIENCE_MS = 1.0
"""How long who waits looks for the next bytes himself: longer than a switch of threads, shorter than anybody minds."""
_LONGEST = 0.05
"""Seconds after which even a message that keeps coming is left to the connection's thread, who watches nothing else."""
_REST = 0.002
"""Seconds for which the connection's thread leaves it alone after somebody has read for himself."""

Frame = tuple[Prefix, bytes, Buffer]


class Inbound:
    """Reads one connection. `run` is the body of its thread; `take_for` may be called by any other."""

    def __init__(
        self,
        rank: int,
        connection: Connection,
        reader: WireReader,
        mailbox: Mailbox,
        limit: RateLimit,
        clock: Clock,
        on_life: Callable[[Tag], None],
    ) -> None:
        self._rank, self._connection, self._reader = rank, connection, reader
        self._mailbox, self._limit, self._clock, self._on_life = mailbox, limit, clock, on_life
        self._reading = threading.Lock()
        self._resume = threading.Event()
        self._resting = False
        self._turns = 0
        """How often somebody has read for himself."""
        self._put_off: Frame | None = None
        """A whole frame for which there is no room: only the connection's thread may wait for that."""
        self._end: tuple[str, bool] | None = None
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._bell: socket.socket | None = None
        """Rings for the connection's thread while it waits for the kernel."""

    # -- the thread of the connection --------------------------------------------------------------------------

    def run(self) -> tuple[str, bool]:
        """Read until the connection ends: why it did, and whether the peer said goodbye."""
        alarm, bell = socket.socketpair()
        with alarm, bell:
            self._bell = bell
            try:
                return self._run(alarm)
            finally:  # from here on the descriptor may be somebody else's: nobody looks at it any more
                self._end = self._end or ("the reader of its messages failed", False)

    def _run(self, alarm: socket.socket) -> tuple[str, bool]:
        idle = select.poll()
        idle.register(self._connection, select.POLLIN)
        idle.register(alarm, select.POLLIN)
        seen = 0
        while self._end is None:
            if self._put_off is None and not self._reader.buffered:
                idle.poll()
                with suppress(BlockingIOError):
                    alarm.recv(64, socket.MSG_DONTWAIT)
            if self._turns != seen:
                seen = self._turns
                if not self._rest():
                    continue
            # Whoever has asked until now is served by this reading; or by whoever reads now, who asks when he ends.
            self._resume.clear()
            if self._reading.acquire(blocking=False):
                seen = self._turns
                try:
                    self._read_all()
                finally:
                    self._reading.release()
            else:
                self._rest()
        return self._end

    def _rest(self) -> bool:
        """Leave the connection alone for a moment; True, at once, where somebody wants us back.

        That stays so until the next try to read: a wish is not lost where it comes just before a rest or just after.
        """
        self._resting = True
        wanted = self._resume.wait(_REST)
        self._resting = False
        return wanted

    def _read_all(self) -> None:
        if self._put_off is not None:
            prefix, header, body = self._put_off
            self._mailbox.put(self._rank, prefix.tag, Message(header, body))
            self._put_off = None
        self._reader.look = self._there
        while self._end is None and self._read_one(patient=True):
            pass

    def _there(self) -> bool:
        return bool(self._readable.poll(0))

    # -- whoever waits -----------------------------------------------------------------------------------------

    def take_for(self, done: Callable[[], bool], timeout: float | None) -> None:
        """Read what comes until `done`, unless somebody reads already or nothing comes in a moment.

        Called with no lock held; `done` is asked between frames and parts of frames. An exception that is no error of
        the connection ends it all the same: nobody could say where its next frame begins.
        """
        if self._limit.active or self._end is not None or not self._reading.acquire(blocking=False):
            return
        try:
            self._turns += 1
            if self._put_off is None:
                self._read_until(done, _LONGEST if timeout is None else min(timeout, _LONGEST))
        except BaseException as error:  # a KeyboardInterrupt: bytes may have been taken that nobody has counted
            self._end = self._end or (f"reading its messages was interrupted by {type(error).__name__}", False)
            raise
        finally:
            self._reading.release()
            self._hand_back(done)

    def _hand_back(self, done: Callable[[], bool]) -> None:
        """The connection's thread goes on, at once where it has to."""
        if self._end is not None or self._put_off is not None or not done() or self._mailbox.waited_for(self._rank):
            self.resume()
        elif not self._resting and self._reader.buffered:
            self._ring()

    def hurry(self) -> None:
        """Somebody waits for what is yet to come: when it does, or where it has, its thread is not to rest.

        No bell: what is in our own buffers somebody has rung for already, and for the rest the kernel rings.
        """
        self._resume.set()

    def resume(self) -> None:
        """Somebody waits who does not read for himself: its thread is to read, and not to rest before.

        One that rests looks at everything when it is over, and needs no bell; one that does not may be with the kernel.
        """
        self._resume.set()
        if not self._resting:
            self._ring()

    def _ring(self) -> None:
        """Its thread may sleep until the kernel has something; what is in our own buffers, only we know."""
        if self._bell is not None:
            with suppress(OSError):  # it has ended, or was rung for often enough
                self._bell.send(b"!", socket.MSG_DONTWAIT)

    def _read_until(self, done: Callable[[], bool], seconds: float) -> None:
        until = self._clock.monotonic() + seconds

        def look() -> bool:
            return not done() and self._clock.monotonic() < until and bool(self._readable.poll(_PATIENCE_MS))

        self._reader.look = look
        while not done() and self._end is None and self._read_one(patient=False):
            pass

    # -- either ------------------------------------------------------------------------------------------------

    def _read_one(self, *, patient: bool) -> bool:
        """Take one frame; False where no whole one is there, or nobody may take another."""
        try:
            return self._take(self._reader.frame(), patient)
        except NothingYetError:
            return False
        except FrameError as error:
            self._end = f"it sent what is not a frame: {error}", False
        except OSError as error:
            self._end = str(error) or type(error).__name__, False
        except MemoryError:
            self._end = "no memory for its next message", False
        return False

    def _take(self, frame: Frame, patient: bool) -> bool:
        prefix, header, body = frame
        if prefix.kind is FrameKind.DATA:
            message = Message(header, body)
            if patient:
                self._mailbox.put(self._rank, prefix.tag, message)
            elif not self._mailbox.offer(self._rank, prefix.tag, message):
                self._put_off = frame
                return False
        elif prefix.kind is FrameKind.KEEP_ALIVE:
            self._on_life(prefix.tag)
        elif prefix.kind is FrameKind.GOODBYE:
            self._end = GOODBYE_REASON, True
        else:
            raise FrameError(f"a {prefix.kind.name} frame after the handshake")
        return True
