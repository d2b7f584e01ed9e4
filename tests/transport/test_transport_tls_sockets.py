"""TLS in our own buffers: against OpenSSL's own socket at the other end, and where things go wrong."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from transport_kit import Authority, linked, secured

from distensor.transport.identity import client_context, peer_identity, server_context
from distensor.transport.tls_sockets import TlsSocket

SIZES = [1, 16_384, 16_385, 131_072, 1_000_003]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def taken(end: TlsSocket | ssl.SSLSocket, size: int) -> bytes:
    room = memoryview(bytearray(size))
    done = 0
    while done < size:
        count: int = end.read(size - done, room[done:])  # type: ignore[assignment]
        assert count, f"it ended after {done} of {size} bytes"
        done += count
    return bytes(room)


def sent(end: TlsSocket | ssl.SSLSocket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[end.write(view) :]


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "python's own"])
def test_every_byte_arrives_in_both_directions(authority: Authority, stock: bool) -> None:
    with secured(authority, stock=stock) as ends, ThreadPoolExecutor(1) as pool:
        assert [peer_identity(end).rank for end in ends] == [1, 0]
        assert all(end.cipher() for end in ends)
        for source, target in (ends, ends[::-1]):
            for size in SIZES:
                data = bytes(index * 7 % 251 for index in range(min(size, 5000))) * (size // 5000 + 1)
                sending = pool.submit(sent, source, data[:size])
                assert taken(target, size) == data[:size]
                sending.result(20)


def test_parts_leave_one_after_the_other_and_as_many_as_fit(authority: Authority) -> None:
    parts = [b"head", b"", bytes(200_000), b"tail"]
    with secured(authority, stock=True) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        taking = pool.submit(taken, theirs, 131_072)
        assert ours.gather(parts) == 131_072
        assert taking.result(20) == b"head" + bytes(131_068)


def test_what_the_kernel_has_no_room_for_is_kept_and_goes_first(authority: Authority) -> None:
    block = bytes(100_000)
    with secured(authority, stock=True) as (ours, theirs), ThreadPoolExecutor(1) as pool:
        ours.settimeout(None)
        offered = 1
        while ours.offer([b"!", block[1:]]):  # nobody reads: at some point it is full
            offered += 1
        assert not ours.offer([b"later"])
        flushing = pool.submit(ours.flush)
        assert taken(theirs, offered * len(block)) == (b"!" + block[1:]) * offered
        assert taken(theirs, 5) == b"later"
        flushing.result(20)
        assert ours.offer([b"now"])
        assert taken(theirs, 3) == b"now"


def test_the_end_is_an_end_and_not_an_error(authority: Authority) -> None:
    with secured(authority, stock=True) as (ours, theirs):
        theirs.close()
        assert ours.read(10, memoryview(bytearray(10))) == 0


def handshake(raw: socket.socket, authority: Authority) -> TlsSocket:
    tls = TlsSocket.over(raw, client_context(authority.place(0)))
    with tls:
        tls.do_handshake()
    return tls


def test_a_handshake_has_its_time_in_all_however_slowly_the_other_end_speaks(authority: Authority) -> None:
    one, other = linked()
    one.settimeout(0.3)
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            try:
                other.send(b"\x16")
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises((TimeoutError, ssl.SSLError)):
            handshake(one, authority)
    finally:
        over.set()
        dripping.join(20)
        other.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(lambda end: end.shutdown(socket.SHUT_RDWR), ssl.SSLEOFError, id="it ends"),
        pytest.param(lambda end: end.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ssl.SSLError, id="it is no TLS"),
    ],
)
def test_what_is_no_handshake_is_an_error(
    authority: Authority, answer: Callable[[socket.socket], None], error: type[Exception]
) -> None:
    one, other = linked()
    with other:
        answer(other)
        with pytest.raises(error):
            handshake(one, authority)


def test_who_is_refused_hears_it(authority: Authority) -> None:
    """The alert leaves although the handshake failed here."""
    one, other = linked()
    stranger = TlsSocket.over(one, client_context(Authority().place(0)))
    server = TlsSocket.over(other, server_context(authority.place(1)), server=True)
    with stranger, server, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.do_handshake)
        with pytest.raises(ssl.SSLError):  # it does not know the server's authority either
            stranger.do_handshake()
        with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
            serving.result(20)
