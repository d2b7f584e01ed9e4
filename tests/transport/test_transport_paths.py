"""Several ways to a peer: which one is taken, and by which way it was."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transport_kit import QUICK, Authority, mesh, peer

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import HandshakeError, TransportTimeoutError
from distensor.transport import Address, Channel, DataPlane, Listener, Tag, Timeouts
from distensor.transport.paths import Attempt, Race, Way, path_of
from distensor.transport.types import PathKind, Peers

sys.path.append(str(Path(__file__).parents[1] / "relay"))
from relay_kit import relay_of

TAG = Tag(Channel.P2P)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("127.0.0.1", "here"),
        ("localhost", "here"),
        ("::1", "here"),
        ("192.168.1.5", "lan"),
        ("10.0.0.1", "lan"),
        ("fe80::1%eth0", "lan"),
        ("fd00::1", "lan"),
        ("2a00:1450::1", "ipv6"),
        ("8.8.8.8", "public"),
        ("home.example.org", "public"),
    ],
)
def test_what_kind_of_way_an_address_is(host: str, path: str) -> None:
    assert path_of(Address(host=host, port=1)) == path


# The race


class Tls:
    """Stands for a connection; notes its end."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def way(name: str, open_: Callable[[float, Attempt], Any], path: PathKind = PathKind.LAN) -> Way:
    return Way(path=path, name=name, open=open_)


def failing(error: Exception) -> Callable[[float, Attempt], ssl.SSLSocket]:
    def open_(timeout: float, attempt: Attempt) -> ssl.SSLSocket:
        raise error

    return open_


def waiting(release: threading.Event, tls: Tls) -> Callable[[float, Attempt], Any]:
    def open_(timeout: float, attempt: Attempt) -> Tls:
        release.wait(timeout)
        return tls

    return open_


def test_the_first_that_leads_there_wins_and_a_later_one_is_closed() -> None:
    release, late, quick = threading.Event(), Tls(), Tls()
    race = Race([way("slow", waiting(release, late)), way("quick", lambda *_: quick)], None, SYSTEM_CLOCK)
    won, tls = race.run(10)
    assert (won.name, tls) == ("quick", quick)
    release.set()
    assert late.closed.wait(10)


def test_a_relay_is_asked_at_once_when_all_direct_ways_have_failed() -> None:
    relayed = Tls()
    ways = [way("one", failing(ConnectionRefusedError("refused"))), way("two", failing(HandshakeError("a stranger")))]
    began = SYSTEM_CLOCK.monotonic()
    won, tls = Race(ways, way("relay", lambda *_: relayed, PathKind.RELAY), SYSTEM_CLOCK).run(30)
    assert (won.path, tls) == (PathKind.RELAY, relayed)
    assert SYSTEM_CLOCK.monotonic() - began < 2.5


def test_the_reasons_of_all_ways_are_told_and_hope_is_kept_where_there_is_some() -> None:
    refused, stranger = ConnectionRefusedError("refused"), HandshakeError("a stranger")
    with pytest.raises(ConnectionError, match=r"lan one: refused; lan two: a stranger"):
        Race([way("one", failing(refused)), way("two", failing(stranger))], None, SYSTEM_CLOCK).run(10)
    with pytest.raises(HandshakeError, match=r"a stranger; lan two: a stranger"):
        Race([way("one", failing(stranger)), way("two", failing(stranger))], None, SYSTEM_CLOCK).run(10)


def test_stopping_ends_a_race_and_cuts_what_is_open() -> None:
    ours, theirs = socket.socketpair()
    started = threading.Event()

    def open_(timeout: float, attempt: Attempt) -> ssl.SSLSocket:
        attempt.hold(ours)
        started.set()
        ours.recv(1)
        raise ConnectionError("cut")

    race = Race([way("one", open_), way("two", open_)], None, SYSTEM_CLOCK)
    thread = threading.Thread(target=lambda: started.wait(10) and race.stop())
    thread.start()
    with pytest.raises(ConnectionError):
        race.run(30)
    thread.join()
    with pytest.raises(ConnectionError, match="another way was faster"):
        race._attempt(way("late", open_)).hold(theirs)
    ours.close()
    theirs.close()


# Planes


@contextmanager
def pair(
    authority: Authority,
    peers_of: Callable[[dict[int, Address]], Peers],
    *,
    relay: Address | None = None,
    timeouts: Timeouts = QUICK,
) -> Iterator[dict[int, DataPlane]]:
    """Ranks 0 and 1, where rank 0 is told `peers_of` the real addresses."""
    listeners = {rank: Listener.bind("127.0.0.1") for rank in range(2)}
    addresses = {rank: listener.address for rank, listener in listeners.items()}
    planes: dict[int, DataPlane] = {}
    errors: list[BaseException] = []

    def open_one(rank: int) -> None:
        try:
            planes[rank] = DataPlane.open(
                peer(rank),
                authority.place(rank),
                listeners[rank],
                peers_of(addresses),
                timeouts=timeouts,
                driver=False,
                relay=relay,
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        yield planes
    finally:
        for plane in planes.values():
            plane.close()
        for listener in listeners.values():
            listener.close()


def exchange(planes: dict[int, DataPlane], size: int = 300_000) -> None:
    body = bytes(size)
    for here, there in ((0, 1), (1, 0)):
        planes[here].send(there, TAG, b"hello", [body])
        message = planes[there].recv(here, TAG, 20)
        assert (message.header, bytes(message.body)) == (b"hello", body)


def refusing() -> Address:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address(host="127.0.0.1", port=server.getsockname()[1])


def test_a_peer_is_reached_by_the_one_of_its_addresses_that_works(authority: Authority) -> None:
    with pair(authority, lambda real: {0: real[0], 1: (refusing(), real[1])}) as planes:
        exchange(planes)
        stats = planes[1].stats()[0]
        assert stats.path is planes[0].stats()[1].path is PathKind.HERE
        assert stats.receive_rate is not None
        assert stats.receive_rate > 0


def test_another_machine_with_the_same_address_is_passed_over(authority: Authority) -> None:
    """192.168.1.5 is somebody else's in every home: its certificate decides."""
    with (
        mesh(Authority(), 2) as strangers,
        Listener_of_stranger(authority) as stranger,
        pair(authority, lambda real: {0: real[0], 1: (stranger, real[1])}) as planes,
    ):
        exchange(planes)
        assert strangers


class Listener_of_stranger:  # noqa: N801 - reads as a sentence where it is used
    """TLS of another authority at an address."""

    def __init__(self, authority: Authority) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        from distensor.transport.identity import server_context

        context = server_context(Authority().place(1))
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(raw, server_side=True):
                    pass
            except OSError:
                continue
            finally:
                raw.close()

    def __enter__(self) -> Address:
        self._thread.start()
        return Address(host="127.0.0.1", port=self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def test_where_no_address_works_a_relay_joins_them(authority: Authority) -> None:
    with relay_of(authority.pem) as relay:
        with pair(authority, lambda real: {0: real[0], 1: (refusing(), refusing())}, relay=relay.address) as planes:
            exchange(planes)
            assert planes[0].stats()[1].path is planes[1].stats()[0].path is PathKind.RELAY
            assert relay.relay.forwarded > 600_000
        while relay.relay.connections:
            SYSTEM_CLOCK.sleep(0.01)


def test_a_relay_that_nobody_needs_forwards_nothing(authority: Authority) -> None:
    with relay_of(authority.pem) as relay:
        with pair(authority, lambda real: real, relay=relay.address) as planes:
            exchange(planes)
            assert planes[0].stats()[1].path is PathKind.HERE
            while relay.relay.connections:
                SYSTEM_CLOCK.sleep(0.01)  # the parked ones go as soon as everybody is there
            exchange(planes)
        assert relay.relay.forwarded == 0


def test_a_relay_that_is_not_there_is_among_the_reasons(authority: Authority) -> None:
    nowhere = refusing()
    quick = Timeouts(connect=1.5, silent=10.0, handshake=5.0, goodbye=2.0)
    with (
        pytest.raises(TransportTimeoutError, match=r"refused|Refused"),
        pair(authority, lambda real: {0: real[0], 1: nowhere}, relay=nowhere, timeouts=quick),
    ):
        pass
