"""The data plane: meeting, messages, loss and goodbye, between planes on real sockets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transport_kit import QUICK, Authority, local_meeting, mesh

from distensor.core.errors import PeerLostError, TransportError, TransportTimeoutError
from distensor.transport import Channel, FrameLimits, Tag


@pytest.fixture(scope="module", params=["tls", "local"])
def authority(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """What holds of TLS between machines holds of the Unix sockets within one."""
    return Authority(local=local_meeting(tmp_path_factory.mktemp("lanes")) if request.param == "local" else None)


def test_messages_keep_their_tags_and_their_order(authority: Authority) -> None:
    with mesh(authority, 2) as planes:
        for index in range(20):
            planes[0].send(1, Tag(Channel.ACTIVATION, step=index % 2), b"h%d" % index, [b"b" * index])
        odd = [planes[1].recv(0, Tag(Channel.ACTIVATION, step=1), 5) for _ in range(10)]
        even = [planes[1].recv(0, Tag(Channel.ACTIVATION, step=0), 5) for _ in range(10)]
    assert [message.header for message in odd] == [b"h%d" % index for index in range(1, 20, 2)]
    assert [bytes(message.body) for message in even] == [b"b" * index for index in range(0, 20, 2)]


def test_everybody_reaches_everybody_and_the_driver(authority: Authority) -> None:
    with mesh(authority, 3, driver=True) as planes:
        for source, plane in planes.items():
            assert plane.peers == planes.keys() - {source}
            for target in plane.peers:
                plane.send(target, Tag(Channel.META), b"from %d" % source)
        for target, plane in planes.items():
            for source in plane.peers:
                assert plane.recv(source, Tag(Channel.META), 5).header == b"from %d" % source, (source, target)


@pytest.mark.parametrize("size", [0, 1, 100, 16_384, 65_537, 5_000_001, 40_000_000])
def test_bodies_arrive_bit_equal(authority: Authority, size: int) -> None:
    data = os.urandom(size)
    with mesh(authority, 2) as planes:
        handle = planes[1].send(0, Tag(Channel.P2P), b"x", [data[: size // 3], memoryview(data)[size // 3 :]])
        assert planes[0].recv(1, Tag(Channel.P2P), 20).body == data
        handle.wait(5)
        assert handle.done


def test_both_send_much_at_once_without_deadlock(authority: Authority) -> None:
    data = os.urandom(30_000_000)
    with mesh(authority, 2) as planes:
        handles = [planes[rank].send(1 - rank, Tag(Channel.P2P), b"", [data]) for rank in (0, 1)]
        for rank in (0, 1):
            assert planes[rank].recv(1 - rank, Tag(Channel.P2P), 20).body == data
        for handle in handles:
            handle.wait(5)


def test_recv_any_takes_the_channel_from_whoever_comes(authority: Authority) -> None:
    with mesh(authority, 3, driver=True) as planes:
        planes[2].send(0, Tag(Channel.GRADIENT), b"not this")
        planes[1].send(0, Tag(Channel.CONTROL, step=7), b"one")
        source, tag, message = planes[0].recv_any(Channel.CONTROL, 5)
        assert (source, tag.step, message.header) == (1, 7, b"one")
        threading.Timer(0.05, planes[-1].send, (0, Tag(Channel.CONTROL, step=8), b"two")).start()
        assert planes[0].recv_any(Channel.CONTROL, 5)[0] == -1
        with pytest.raises(TransportTimeoutError, match=r"0\.05 s for a message on control"):
            planes[0].recv_any(Channel.CONTROL, 0.05, peers=[2])


def test_timeouts_name_what_did_not_come(authority: Authority) -> None:
    with mesh(authority, 2) as planes, pytest.raises(TransportTimeoutError, match="rank 1 to send tied step=3"):
        planes[0].recv(1, Tag(Channel.TIED, step=3), 0.05)


def test_a_message_that_comes_after_a_timeout_is_not_lost(authority: Authority) -> None:
    tag = Tag(Channel.TIED)
    with mesh(authority, 2) as planes:
        with pytest.raises(TransportTimeoutError):
            planes[0].recv(1, tag, 0.01)
        planes[1].send(0, tag, b"late")
        assert planes[0].recv(1, tag, 5).header == b"late"


def test_a_goodbye_is_told_apart_and_leaves_queued_messages(authority: Authority) -> None:
    with mesh(authority, 3) as planes:
        planes[0].send(1, Tag(Channel.P2P), b"last words", [b"x" * 3_000_000])
        planes[0].close()
        assert planes[1].recv(0, Tag(Channel.P2P), 5).header == b"last words"
        with pytest.raises(PeerLostError, match=r"lost peer rank 0: .*goodbye"):
            planes[1].recv(0, Tag(Channel.P2P), 5)
        assert planes[1].departed() == {0}
        with pytest.raises(PeerLostError):
            planes[1].check(0)
        with pytest.raises(PeerLostError):
            planes[1].send(0, Tag(Channel.P2P))
        planes[1].check(2)


def test_a_stranger_is_no_peer(authority: Authority) -> None:
    with mesh(authority, 2) as planes:
        with pytest.raises(TransportError, match="rank 9 is no peer of rank 0; connected: rank 1"):
            planes[0].send(9, Tag(Channel.P2P))
        with pytest.raises(TransportError, match="rank 9"):
            planes[0].recv(9, Tag(Channel.P2P), 1)


def test_closing_wakes_own_waiters_and_ends_threads(authority: Authority) -> None:
    before = set(threading.enumerate())
    caught: list[BaseException] = []

    def wait(plane: object, tag: Tag) -> None:
        try:
            plane.recv(1, tag)  # type: ignore[attr-defined]
        except PeerLostError as error:
            caught.append(error)

    with mesh(authority, 2) as planes:
        waiter = threading.Thread(target=wait, args=(planes[0], Tag(Channel.P2P)))
        waiter.start()
        planes[0].close()
        waiter.join(5)
        planes[0].close()
    assert len(caught) == 1
    assert set(threading.enumerate()) <= before


def test_statistics_are_what_the_socket_took(authority: Authority) -> None:
    with mesh(authority, 2) as planes:
        planes[0].send(1, Tag(Channel.P2P), b"12345", [bytes(1_000_000)]).wait(5)
        planes[1].recv(0, Tag(Channel.P2P), 5)
        sent, received = planes[0].stats()[1], planes[1].stats()[0]
    # On a slow machine the first keep-alive and its answer are among them, 48 bytes each.
    for counted in (sent.bytes_sent, received.bytes_received):
        assert counted - (1_000_000 + 5 + 48) in (0, 48, 96)
    assert (sent.messages_sent, received.messages_received) == (1, 1)


def test_silence_is_loss_and_keep_alives_prevent_it(authority: Authority) -> None:
    quick = replace(QUICK, silent=1.5)  # a busy machine may hold a thread up for some tenths of a second
    with mesh(authority, 2, timeouts=quick) as planes:
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert not planes[0].lost()
            threading.Event().wait(0.1)
        assert planes[0].stats()[1].bytes_received > 0


def test_more_than_the_limit_may_be_sent_before_anybody_reads(authority: Authority) -> None:
    """The sender is held back, not lost: the receiver was only slow."""
    limits = FrameLimits(queued=1_000_000)
    with mesh(authority, 2, limits=limits, timeouts=replace(QUICK, silent=1.5)) as planes:
        handles = [planes[0].send(1, Tag(Channel.P2P, step=step), b"", [bytes(900_000)]) for step in range(20)]
        with pytest.raises(TransportTimeoutError):
            handles[-1].wait(2.5)
        for step in range(20):
            assert len(planes[1].recv(0, Tag(Channel.P2P, step=step), 10).body) == 900_000
        handles[-1].wait(10)
        assert not planes[0].lost()
        assert not planes[1].lost()


def test_the_data_plane_loads_no_torch(python: Callable[..., Any]) -> None:
    code = "import sys, distensor.transport as t; t.DataPlane; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"
