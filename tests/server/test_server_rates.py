from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distensor_server.messages import LinkBytes
from distensor_server.rates import STALE_SECONDS, LinkMeter


def meter(*samples: tuple[float, int, int]) -> LinkMeter:
    built = LinkMeter()
    for at, sent, received in samples:
        built.update([LinkBytes(peer=-1, sent=sent, received=received)], at)
    return built


def test_a_rate_needs_two_samples() -> None:
    (rate,) = meter((0, 100, 50)).rates(0)
    assert (rate.peer, rate.sent, rate.received, rate.sent_rate) == (-1, 100, 50, None)


def test_a_rate_is_bytes_over_seconds() -> None:
    (rate,) = meter((10, 0, 0), (11, 1000, 500), (12, 2000, 1000)).rates(12)
    assert (rate.sent_rate, rate.received_rate) == (1000.0, 500.0)


def test_only_the_last_two_seconds_count() -> None:
    history = [(float(t), 1_000_000 * t, 0) for t in range(10)] + [(10.0, 9_000_000, 0), (11.0, 9_000_000, 0)]
    (rate,) = meter(*history, (12.0, 9_000_000, 0)).rates(12.0)
    assert rate.sent_rate == 0.0


def test_a_worker_that_started_again_has_no_old_rate() -> None:
    (rate,) = meter((0, 0, 0), (1, 5000, 0), (2, 10, 0)).rates(2)
    assert (rate.sent, rate.sent_rate) == (10, None)
    (rate,) = meter((0, 0, 0), (1, 5000, 0), (2, 10, 0), (3, 110, 0)).rates(3)
    assert rate.sent_rate == 100.0


def test_a_silent_worker_has_no_rate() -> None:
    built = meter((0, 0, 0), (1, 5000, 0))
    assert built.rates(1 + STALE_SECONDS - 0.1)[0].sent_rate == 5000.0
    assert built.rates(1 + STALE_SECONDS)[0].sent_rate is None


@given(st.floats(0.1, 1.0), st.integers(0, 10**9), st.integers(2, 40))
def test_a_constant_stream_has_its_rate(interval: float, per_step: int, count: int) -> None:
    samples = [(n * interval, n * per_step, 0) for n in range(count)]
    (rate,) = meter(*samples).rates(samples[-1][0])
    assert rate.sent_rate is not None
    assert abs(rate.sent_rate - per_step / interval) <= 1e-6 * per_step / interval + 1e-9


def test_memory_is_bounded() -> None:
    built = meter(*((n * 0.5, n, n) for n in range(10_000)))
    assert len(built._samples[-1]) < 10


def test_a_round_trip_grows_old_until_the_next_one() -> None:
    built = LinkMeter()
    built.update([LinkBytes(peer=2, sent=0, received=0, rtt_ms=41.5, rtt_age_s=1.5)], 10.0)
    (rate,) = built.rates(13.0)
    assert (rate.rtt_ms, rate.rtt_age_s) == (41.5, 4.5)
    built.update([LinkBytes(peer=2, sent=9, received=9, rtt_ms=12.0, rtt_age_s=0.0)], 14.0)
    assert built.rates(14.0)[0].rtt_ms == 12.0
    built.update([LinkBytes(peer=2, sent=0, received=0)], 15.0)
    assert (built.rates(15.0)[0].rtt_ms, built.rates(15.0)[0].rtt_age_s) == (None, None), "a new process"
