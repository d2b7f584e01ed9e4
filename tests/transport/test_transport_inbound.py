"""Messages read by the thread that waits for them, by the connection's own, and by both in turn."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from transport_kit import Authority, mesh, secured

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import TransportTimeoutError
from distensor.transport import Channel, FrameLimits, Tag, inbound
from distensor.transport.frames import FrameKind, encode_prefix
from distensor.transport.inbound import Inbound
from distensor.transport.local_lanes import LocalSocket
from distensor.transport.mailbox import Mailbox
from distensor.transport.rates import RateLimit
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import NothingYetError
from distensor.transport.wire import WireReader

Sealing: TypeAlias = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def tag(slot: int, step: int = 0, channel: Channel = Channel.P2P) -> Tag:
    return Tag(channel, step=step, slot=slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """One connection's reading end, without a plane around it, and the socket by which its peer sends."""

    inward: Inbound
    mailbox: Mailbox
    peer: socket.socket

    def send(self, slot: int, body: bytes = b"") -> None:
        self.peer.sendall(encode_prefix(FrameKind.DATA, 1, tag(slot), 0, len(body)) + body)

    @contextmanager
    def read_by_its_thread(self) -> Iterator[None]:
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(self.inward.run)
            try:
                yield
            finally:
                self.peer.close()
                self.inward.resume()
                reading.result(20)


@pytest.fixture
def wire() -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    with LocalSocket(ours.family, ours.type, fileno=ours.detach()) as connection, theirs:
        reader, mailbox = WireReader(connection, 1, FrameLimits()), Mailbox(queued_limit=1 << 20)
        inward = Inbound(0, connection, reader, mailbox, RateLimit(SYSTEM_CLOCK), SYSTEM_CLOCK, lambda _tag: None)
        yield Wire(inward=inward, mailbox=mailbox, peer=theirs)


def test_a_wish_before_the_rest_ends_it_at_once(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "_REST", 0.0)
    assert not wire.inward._rest()
    wire.inward.resume()
    assert wire.inward._rest()


def test_a_wish_at_the_end_of_a_rest_counts_for_the_next(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    class JustTooLate(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            found = super().wait(timeout)
            wire.inward.resume()
            return found

    monkeypatch.setattr(inbound, "_REST", 0.0)
    wire.inward._resume = JustTooLate()
    assert not wire.inward._rest()
    assert wire.inward._rest()


def test_who_gives_up_reading_is_not_kept_waiting_by_a_rest(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rest of its thread would not end before the test is given up: whatever arrives came without one."""
    monkeypatch.setattr(inbound, "_REST", 1000.0)
    with wire.read_by_its_thread():
        for slot in range(20):
            wire.inward.take_for(lambda: False, 0.0)
            wire.send(slot, b"late")
            assert wire.mailbox.get(0, tag(slot), 20.0).body == b"late"


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.001)


def test_an_interrupt_amid_reading_ends_the_connection_and_says_so(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes were taken and not yet counted: whatever came next would be read as something else."""
    receive = WireReader._receive

    def interrupted(reader: WireReader, view: memoryview) -> int:
        receive(reader, view)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(inbound, "_REST", 1000.0)
        reading = pool.submit(wire.inward.run)
        try:
            until(lambda: wire.inward._bell is not None)
            with monkeypatch.context() as patched:
                patched.setattr(WireReader, "_receive", interrupted)
                wire.inward._reading.acquire()  # its thread keeps off until it is our turn
                wire.send(1, b"half of a message")
                wire.inward._reading.release()
                with pytest.raises(KeyboardInterrupt):
                    wire.inward.take_for(lambda: False, 20.0)
            assert reading.result(20) == ("reading its messages was interrupted by KeyboardInterrupt", False)
        finally:
            wire.peer.close()


def test_who_takes_any_hurries_the_threads_of_those_he_waits_for(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried: list[Inbound] = []
    monkeypatch.setattr(Inbound, "hurry", lambda inward: hurried.append(inward))
    with mesh(authority, 3) as planes:
        for peers, told in ((None, {0, 2}), ([2], {2})):
            hurried.clear()
            with pytest.raises(TransportTimeoutError):
                planes[1].recv_any(Channel.STATE, 0.0, peers=peers)
            assert {rank for rank in (0, 2) if planes[1]._links[rank].inward in hurried} == told
            assert len(hurried) == len(told)
        hurried.clear()
        planes[0].send(1, tag(1), b"now")
        until(lambda: planes[1].has(0, tag(1)))
        assert planes[1].recv_any(Channel.P2P, 20)[2].header == b"now"
        assert hurried == []


def test_a_hurried_thread_does_not_rest_when_something_comes(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "_REST", 1000.0)
    with wire.read_by_its_thread():
        for slot in range(20):
            wire.inward._turns += 1  # somebody has read for himself
            wire.inward.hurry()
            wire.send(slot)
            wire.mailbox.get(0, tag(slot), 20.0)


def test_who_waits_reads_for_himself_and_the_connection_is_watched_again_afterwards(authority: Authority) -> None:
    with mesh(authority, 2) as planes:
        with ThreadPoolExecutor(1) as pool:

            def answer() -> None:
                for step in range(100):
                    assert planes[1].recv(0, tag(1, step), 20).header == b"ping"
                    planes[1].send(0, tag(1, step), b"pong")

            answering = pool.submit(answer)
            for step in range(100):
                planes[0].send(1, tag(1, step), b"ping")
                assert planes[0].recv(1, tag(1, step), 20).header == b"pong"
            answering.result(20)
        assert all(planes[rank]._links[1 - rank].inward._turns for rank in planes)
        planes[0].send(1, tag(2), b"unasked")  # nobody waits: its own thread brings it
        arrived = threading.Event()
        while not planes[1].has(0, tag(2)):
            assert not arrived.wait(0.005)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_who_wait_for_one_peer_all_get_theirs_in_order(authority: Authority, seed: int) -> None:
    """Exact receives in four threads, one that takes whatever comes on a channel, sizes that cut frames anywhere."""
    draw = random.Random(seed)
    sizes = {slot: [draw.choice([0, 10, 5_000, 70_000]) for _ in range(60)] for slot in range(5)}
    order = [slot for slot in sizes for _ in sizes[slot]]
    draw.shuffle(order)
    with mesh(authority, 2) as planes, ThreadPoolExecutor(6) as pool:

        def take(slot: int) -> list[int]:
            return [len(planes[1].recv(0, tag(slot, step), 30).body) for step in range(len(sizes[slot]))]

        def take_any() -> list[int]:
            return [len(planes[1].recv_any(Channel.STATE, 30)[2].body) for _ in sizes[4]]

        taking = {slot: pool.submit(take, slot) for slot in range(4)} | {4: pool.submit(take_any)}
        steps = dict.fromkeys(sizes, 0)
        for slot in order:
            step = steps[slot]
            channel = Channel.STATE if slot == 4 else Channel.P2P
            planes[0].send(1, tag(slot, step, channel), b"", [bytearray(sizes[slot][step])])
            steps[slot] += 1
        assert {slot: found.result(60) for slot, found in taking.items()} == sizes


def test_who_reads_for_himself_takes_no_more_than_there_is_room_for(authority: Authority) -> None:
    with mesh(authority, 2, limits=FrameLimits(queued=1000)) as planes:
        for step in range(4):
            planes[0].send(1, tag(1, step), b"", [bytearray(800)])
        planes[0].send(1, tag(2), b"behind them")
        with pytest.raises(TransportTimeoutError):
            planes[1].recv(0, tag(2), 0.1)
        assert planes[1]._mailbox._queued_bytes[0] <= 1000
        for step in range(4):
            assert len(planes[1].recv(0, tag(1, step), 20).body) == 800
        assert planes[1].recv(0, tag(2), 20).header == b"behind them"


def as_it_is(data: bytes) -> bytes:
    return data


@contextmanager
def carrier(authority: Authority, *, tls: bool) -> Iterator[tuple[LocalSocket | TlsSocket, socket.socket, Sealing]]:
    """A reading end, the socket by which its peer sends, and what makes of bytes what travels there."""
    if tls:
        with secured(authority, stock=False) as (theirs, ours):
            assert isinstance(ours, TlsSocket)

            def seal(data: bytes) -> bytes:
                view = memoryview(data)
                while view:
                    view = view[theirs._session.write(view) :]
                return theirs._outgoing.read()

            yield ours, theirs, seal
    else:
        one, other = socket.socketpair()
        with LocalSocket(one.family, one.type, fileno=one.detach()) as connection, other:
            connection.settimeout(20)
            yield connection, other, as_it_is


@pytest.mark.parametrize("tls", [False, True], ids=["unix", "tls"])
def test_a_frame_that_comes_in_pieces_is_gone_on_with_where_it_stopped(authority: Authority, tls: bool) -> None:
    """No read blocks where `look` has said no: it would end with the socket's timeout."""
    body = bytes(range(256)) * 300
    data = encode_prefix(FrameKind.DATA, 1, tag(3), 5, len(body)) + b"words" + body
    with carrier(authority, tls=tls) as (connection, peer, seal):
        stream = seal(data)
        reader = WireReader(connection, 1, FrameLimits())
        given, found = 0, None
        while found is None:
            assert given < len(stream), "all of it is there, and no frame came"
            piece = stream[given : given + 997]
            peer.sendall(piece)
            given += len(piece)
            for there in (True, False):
                reader.look = iter([there, False]).__next__
                with suppress(NothingYetError):
                    found = reader.frame()
                    break
        prefix, header, taken = found
        assert (prefix.tag, header, bytes(taken)) == (tag(3), b"words", body)
        assert reader.bytes_received == len(data)
        assert given == len(stream)
