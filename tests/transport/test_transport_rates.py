"""Caps on bytes per second: over any stretch of time no more passes than the cap and a short burst."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import QUICK, Authority, local_meeting, mesh

from distensor.core.errors import TransportTimeoutError
from distensor.testing.clock import FakeClock
from distensor.transport.rates import BURST_SECONDS, RateLimit
from distensor.transport.types import Channel, Tag


class SleepingClock(FakeClock):
    """One thread: to sleep is to let the time pass."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(1e4, 1e7),
    steps=st.lists(st.tuples(st.integers(1, 20_000), st.floats(0, 2)), min_size=1, max_size=12),
)
def test_no_stretch_of_time_has_more_than_its_share(rate: float, steps: list[tuple[int, float]]) -> None:
    clock = SleepingClock()
    limit = RateLimit(clock)
    limit.set_rate(rate)
    passed: list[tuple[float, int]] = []
    for size, pause in steps:
        clock.advance(pause)
        left = size
        while left:
            piece = limit.piece(left)
            limit.spend(piece)
            passed.append((clock.monotonic(), piece))
            left -= piece
    for i in range(len(passed)):
        for j in range(i, len(passed)):
            # Pieces that passed within the stretch, the first of which may have been booked before it.
            total = sum(size for _, size in passed[i + 1 : j + 1])
            assert total <= rate * (passed[j][0] - passed[i][0] + BURST_SECONDS) + 1e-6


def test_the_cap_is_reached() -> None:
    clock = SleepingClock()
    limit = RateLimit(clock)
    limit.set_rate(1000.0)
    started = clock.monotonic()
    for _ in range(100):
        limit.spend(100)
    assert clock.monotonic() - started == pytest.approx(10.0, abs=BURST_SECONDS + 0.01)


@pytest.mark.parametrize(("rate", "piece"), [(None, 1 << 20), (1e9, 1 << 16), (40_000.0, 2_000), (10.0, 512)])
def test_pieces_are_short_enough_to_stay_heard(rate: float | None, piece: int) -> None:
    limit = RateLimit(FakeClock())
    limit.set_rate(rate)
    assert limit.piece(1 << 20) == piece


def test_a_cap_that_is_lifted_lets_a_waiting_piece_go() -> None:
    limit: RateLimit

    class Lifting(SleepingClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.monotonic() > 1.0:
                limit.set_rate(None)

    clock = Lifting()
    limit = RateLimit(clock)
    limit.set_rate(1.0)
    started = clock.monotonic()
    limit.spend(100_000)
    assert clock.monotonic() - started < 100.0
    assert not limit.active


@pytest.mark.parametrize("local", [False, True])
def test_a_capped_plane_carries_the_same_bytes(local: bool, tmp_path: Path) -> None:
    """Caps far above what the test takes would be no test: 4 MB/s for 1 MB, in real time, both directions."""
    payload = bytes(range(256)) * 4096
    with mesh(Authority(local=local_meeting(tmp_path / "lanes") if local else None), 2) as planes:
        planes[0].limit_rates(send=4e6, receive=None)
        planes[1].limit_rates(send=None, receive=4e6)
        handle = planes[0].send(1, Tag(Channel.META, 7), b"", [payload])
        message = planes[1].recv(0, Tag(Channel.META, 7), 30.0)
        handle.wait(30.0)
        assert bytes(message.body) == payload
        planes[0].limit_rates(send=None, receive=None)
        planes[0].send(1, Tag(Channel.META, 8), b"", [payload]).wait(30.0)
        assert bytes(planes[1].recv(0, Tag(Channel.META, 8), 30.0).body) == payload


@pytest.mark.parametrize("capped", ["send", "receive"])
def test_the_measured_rate_is_not_above_the_cap(capped: str) -> None:
    """A slow machine may be slower than its cap, and never faster."""
    rate, size = 4e6, 1 << 20
    with mesh(Authority(), 2) as planes:
        planes[0].limit_rates(send=rate if capped == "send" else None, receive=None)
        planes[1].limit_rates(send=None, receive=rate if capped == "receive" else None)
        began = time.monotonic()
        planes[0].send(1, Tag(Channel.META, 7), b"", [bytes(size)])
        assert len(planes[1].recv(0, Tag(Channel.META, 7), 30.0).body) == size
        measured = (size - BURST_SECONDS * rate) / (time.monotonic() - began)
        assert measured <= rate


@pytest.mark.parametrize("capped", ["send", "receive"])
def test_a_capped_peer_stays_heard(capped: str) -> None:
    """One message takes far longer than a peer may be silent, whichever end has the cap."""
    with mesh(Authority(), 2, timeouts=replace(QUICK, silent=1.2)) as planes:
        planes[0].limit_rates(send=4e3 if capped == "send" else None, receive=None)
        planes[1].limit_rates(send=None, receive=4e3 if capped == "receive" else None)
        planes[0].send(1, Tag(Channel.META, 7), b"", [bytes(1 << 20)])
        with pytest.raises(TransportTimeoutError):
            planes[1].recv(0, Tag(Channel.META, 7), 3.0)
        assert not planes[0].lost()
        assert not planes[1].lost()
        for plane in planes.values():
            plane.limit_rates(send=None, receive=None)
        assert len(planes[1].recv(0, Tag(Channel.META, 7), 30.0).body) == 1 << 20
