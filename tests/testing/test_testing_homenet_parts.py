"""The emulated internet without a system: lines, packets, the router's arithmetic; and the TCP forwarder."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import ConfigError
from distensor.testing.homenet.delay_line import DelayLine
from distensor.testing.homenet.packets import destination, opens_connection, packed
from distensor.testing.homenet.profiles import HOME, MEGABIT, Line, Profile, lines_of
from distensor.testing.homenet.routing import Place, Router

LOSSLESS = Profile(name="lossless", down=100 * MEGABIT, up=10 * MEGABIT, rtt=0.04)
A, B = packed("10.77.0.1"), packed("10.77.0.2")


def packet(source: bytes, target: bytes, *, flags: int = 0x10, size: int = 1000, protocol: int = 6) -> bytes:
    head = struct.pack("!BBHHHBBH", 0x45, 0, size, 0, 0, 64, protocol, 0) + source + target
    tcp = struct.pack("!HHIIBB", 1, 2, 0, 0, 5 << 4, flags)
    return (head + tcp).ljust(size, b"\0")


def line(**changes: float) -> Line:
    given = {"rate": 1000.0, "delay": 0.5, "loss": 0.0, "queue": 2.0} | changes
    return Line(**given, chance=random.Random(0))


def test_packets_follow_each_other_at_the_rate_and_arrive_after_the_delay() -> None:
    one = line()
    assert [one.offer(0.0, 500) for _ in range(3)] == [1.0, 1.5, 2.0]
    assert one.offer(10.0, 500) == 11.0
    assert (one.carried, one.dropped) == (2000, 0)


def test_a_full_queue_drops() -> None:
    one = line(queue=1.0)
    arrivals = [one.offer(0.0, 500) for _ in range(5)]
    assert arrivals == [1.0, 1.5, 2.0, None, None]
    assert one.dropped == 2


def test_two_lines_lose_what_the_profile_says_and_halve_its_way() -> None:
    up, down = lines_of(HOME, random.Random(1))
    kept = sum(up.offer(n, 100) is not None and down.offer(n, 100) is not None for n in range(20_000))
    assert kept / 20_000 == pytest.approx(0.99, abs=0.003)
    assert 2 * (up.delay + down.delay) == pytest.approx(HOME.rtt)
    assert (up.rate, down.rate) == (1.25e6, 12.5e6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(40, 1500)), max_size=60))
def test_whatever_comes_a_line_keeps_order_and_rate(offers: list[tuple[float, int]]) -> None:
    one, now, arrivals = line(rate=1e5, delay=0.02, queue=0.05), 0.0, []
    for gap, size in offers:
        now += gap
        if (at := one.offer(now, size)) is not None:
            arrivals.append((at, size))
    assert arrivals == sorted(arrivals)
    for (before, _), (after, size) in itertools.pairwise(arrivals):
        assert after - before >= size / 1e5 - 1e-9


@pytest.mark.parametrize("wrong", [{"down": 0}, {"rtt": -1}, {"loss": 1.0}, {"queue": 0}])
def test_a_profile_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="rates and queue are above 0"):
        Profile(**{"name": "x", "down": 1.0, "up": 1.0, "rtt": 0.0} | wrong)


def test_what_a_router_reads_of_a_packet() -> None:
    assert destination(packet(A, B)) == B
    assert destination(b"") == destination(b"\x10" + bytes(40)) == b""
    six = b"\x60" + bytes(5) + b"\x06\x40" + packed("fd77::1") + packed("fd77::2") + bytes(13) + b"\x02" + bytes(6)
    assert destination(six) == packed("fd77::2")
    assert opens_connection(six)
    assert opens_connection(packet(A, B, flags=0x02))
    assert not opens_connection(packet(A, B, flags=0x12)), "the answer to an opening opens nothing"
    assert not opens_connection(packet(A, B, flags=0x02, protocol=17))
    assert not opens_connection(packet(A, B)[:30])


def two(closed: str = "") -> Router:
    places = {}
    for name, address in (("a", A), ("b", B)):
        up, down = lines_of(LOSSLESS, random.Random(0))
        places[name] = Place(name=name, addresses=(address,), up=up, down=down, closed=name == closed)
    return Router(places)


def test_a_packet_crosses_both_lines() -> None:
    router = two()
    router.take("a", packet(A, B), 0.0)
    up = 1000 / 1.25e6 + 0.01
    assert router.next_at == pytest.approx(up)
    assert router.due(up) == []
    assert router.next_at == pytest.approx(up + 1000 / 12.5e6 + 0.01)
    assert router.due(1.0) == [("b", packet(A, B))]
    assert router.next_at is None


def test_a_closed_host_is_reached_only_by_answers() -> None:
    router = two(closed="b")
    router.take("a", packet(A, B, flags=0x02), 0.0)
    assert router.next_at is None
    router.take("b", packet(B, A, flags=0x02), 0.0)
    router.take("a", packet(A, B, flags=0x12), 0.0)
    assert sorted(name for name, _ in router.due(1.0) + router.due(1.0)) == ["a", "b"]


def test_a_way_is_cut_and_mended_in_both_directions() -> None:
    router = two()
    router.cut("b", "a", cut=True)
    router.take("a", packet(A, B), 0.0)
    router.take("b", packet(B, A), 0.0)
    router.take("a", packet(A, packed("192.0.2.1")), 0.0)
    assert router.next_at is None
    router.cut("a", "b", cut=False)
    router.take("a", packet(A, B), 0.0)
    assert router.next_at is not None


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def test_the_forwarder_delays_limits_and_keeps_every_byte() -> None:
    profile = Profile(name="slow", down=4e6, up=2e6, rtt=0.04, loss=0.05)
    data = bytes(random.Random(3).randbytes(200_000))
    with socket.create_server(("127.0.0.1", 0)) as server, DelayLine(server.getsockname(), profile) as slow:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        with socket.create_connection(slow.address) as client:
            client.settimeout(20)
            began = SYSTEM_CLOCK.monotonic()
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            back = b"".join(iter(lambda: client.recv(1 << 16), b""))
            taken = SYSTEM_CLOCK.monotonic() - began
        assert back == data
        assert slow.carried == (200_000, 200_000)
    assert taken >= 0.04 + 200_000 / 2e6


def test_the_forwarder_ends_a_connection_whose_target_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nowhere = server.getsockname()
    with DelayLine(nowhere, LOSSLESS) as slow, socket.create_connection(slow.address) as client:
        client.settimeout(10)
        assert client.recv(1) == b""
