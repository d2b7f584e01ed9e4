"""Who meets whom at a relay, and how much of it a job may use."""

from __future__ import annotations

import pytest

from distensor.comm.relay_words import Place
from distensor.core.errors import ConfigError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.relay.desk import MOST_JOBS, MOST_PARKED, Caps, Desk

JOB = JobId("j_1")
HERE = Place(job_id=JOB, epoch=Epoch(1), rank=Rank(0))


def test_those_that_wait_are_taken_in_their_order_and_once() -> None:
    desk: Desk[str] = Desk(Caps())
    assert desk.take(HERE) is None
    assert desk.park(HERE, "first") is None
    desk.park(HERE, "second")
    desk.park(HERE, "gone")
    desk.unpark(HERE, "gone")
    assert [desk.take(HERE) for _ in range(3)] == ["first", "second", None]
    desk.unpark(HERE, "first")


def test_one_member_keeps_so_many_and_the_oldest_goes() -> None:
    desk: Desk[int] = Desk(Caps())
    gone = [desk.park(HERE, number) for number in range(MOST_PARKED + 2)]
    assert gone == [None] * MOST_PARKED + [0, 1]
    assert desk.take(HERE) == 2


def test_places_of_other_jobs_epochs_and_ranks_are_other_places() -> None:
    desk: Desk[str] = Desk(Caps())
    desk.park(HERE, "here")
    for other in (
        Place(job_id=JobId("j_2"), epoch=Epoch(1), rank=Rank(0)),
        Place(job_id=JOB, epoch=Epoch(2), rank=Rank(0)),
        Place(job_id=JOB, epoch=Epoch(1), rank=Rank(1)),
    ):
        assert desk.take(other) is None


def test_a_job_has_its_connections_and_bytes_and_no_more() -> None:
    desk: Desk[str] = Desk(Caps(job_connections=2, job_bytes=100))
    assert [desk.admit(JOB), desk.admit(JOB)] == [None, None]
    assert "2 connections" in str(desk.admit(JOB))
    desk.dismiss(JOB)
    assert desk.admit(JOB) is None
    desk.forwarded(JOB, 60)
    assert desk.left(JOB) == 40
    desk.forwarded(JOB, 40)
    desk.dismiss(JOB)
    assert "100 bytes" in str(desk.admit(JOB))
    assert desk.admit(JobId("j_2")) is None
    assert desk.total == 100


def test_the_books_of_old_jobs_are_forgotten() -> None:
    desk: Desk[str] = Desk(Caps(job_bytes=10))
    for number in range(MOST_JOBS + 1):
        desk.forwarded(JobId(f"j_{number}"), 10)
        desk.forwarded(JobId("j_0"), 0)
    assert desk.left(JobId("j_0")) == 0, "it was heard of all the time"
    assert desk.left(JobId("j_1")) == 10
    assert desk.left(JobId("j_2")) == 0


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"job_connections": 0}, {"job_bytes": 0}, {"rate": 0.0}])
def test_a_cap_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="every cap is above 0"):
        Caps(**wrong)
