"""Round trips of keep-alives: the numbers, and between planes on real sockets."""

from __future__ import annotations

import threading
import time

import pytest
from transport_kit import Authority, mesh

from distensor.transport.frames import FrameKind
from distensor.transport.round_trips import KEPT, RoundTrips, answering, asking, question_in
from distensor.transport.types import Channel, Tag


def test_a_question_comes_back_with_its_number() -> None:
    trips = RoundTrips()
    tag = trips.ask(10.0)
    number = question_in(tag)
    assert number == 1
    assert (trips.shortest, trips.last_at) == (None, None)
    trips.heard(answering(number), 10.25)
    assert (trips.shortest, trips.last_at) == (0.25, 10.25)


def test_only_the_answer_to_the_last_question_counts_and_only_once() -> None:
    trips = RoundTrips()
    trips.ask(0.0)
    trips.ask(5.0)
    trips.heard(answering(1), 5.1)
    trips.heard(answering(7), 5.1)
    trips.heard(asking(2), 5.1)
    trips.heard(Tag(Channel.META), 5.1)
    assert trips.shortest is None
    trips.heard(answering(2), 5.5)
    trips.heard(answering(2), 9.0)
    assert (trips.shortest, trips.last_at) == (0.5, 5.5)


def test_the_shortest_of_the_last_few_counts() -> None:
    trips = RoundTrips()
    for index, seconds in enumerate([0.001, *[0.3] * (KEPT - 1)]):
        trips.heard(answering(question_in(trips.ask(float(index))) or 0), index + seconds)
    assert trips.shortest == pytest.approx(0.001)
    trips.heard(answering(question_in(trips.ask(100.0)) or 0), 100.3)
    assert trips.shortest == pytest.approx(0.3), "the first one is forgotten"


def test_a_plain_keep_alive_asks_nothing_and_an_answer_is_no_question() -> None:
    assert question_in(Tag(Channel.META)) is None
    assert question_in(answering(5)) is None


def test_planes_measure_each_other_from_the_beginning() -> None:
    with mesh(Authority(), 3, driver=True) as planes:
        deadline = time.monotonic() + 20
        waiting = threading.Event()
        while any(s.rtt_seconds is None for p in planes.values() for s in p.stats().values()):
            assert time.monotonic() < deadline, "no round trip within 20 s"
            waiting.wait(0.01)
        for plane in planes.values():
            for stats in plane.stats().values():
                assert stats.rtt_seconds is not None
                assert stats.rtt_at is not None
                assert 0 <= stats.rtt_seconds < 20
                assert stats.messages_sent == 0, "a keep-alive is no message"


def test_a_flood_of_questions_queues_one_answer() -> None:
    with mesh(Authority(), 2) as planes:
        link = planes[0]._links[1]
        with link._writing:  # nothing leaves for now
            for number in range(1, 1000):
                link._heard_life(asking(number))
            assert sum(item.kind is FrameKind.KEEP_ALIVE and item.answers is not None for item in link._queue) <= 1
