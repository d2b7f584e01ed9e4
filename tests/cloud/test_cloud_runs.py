"""Runs: what trainers tell over gRPC is read and streamed over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cloud_kit import Client, CloudHub

from distensor.comm import HubClient
from distensor.comm.keys import KeyKind
from distensor.comm.tokens import Role
from distensor.core.control import JobState
from distensor.core.errors import ControlError, NotAllowedError
from distensor.core.ids import Epoch, JobId
from distensor.core.progress import StepProgress
from distensor.hub.authorization import Scope
from distensor.hub.runs import MOST_RUNS, MOST_STEPS_KEPT, Runs


def step(number: int) -> StepProgress:
    return StepProgress(step=number, loss=4.0 / (number + 1), tokens=512, seconds=0.5, bytes_sent=10, bytes_received=20)


@contextmanager
def trainer(hub: CloudHub, account: str = "me") -> Iterator[HubClient]:
    token = hub.hub.token(Role.TRAINER, hub.key(account, KeyKind.TRAINER))
    with HubClient(token) as client:
        yield client


def new_job(hub: CloudHub, name: str) -> JobId:
    return hub.do(hub.submit("me", name))


class Events:
    """A stream of events, read as a browser reads it."""

    def __init__(self, client: Client, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection(client.address.host, client.address.port, timeout=30)
        self._connection.request("GET", path, headers={"Authorization": f"Bearer {client.key}", **headers})
        self.answer = self._connection.getresponse()

    def next(self) -> dict[str, Any] | None:
        """The next event; None at the end of the stream."""
        fields: dict[str, Any] = {}
        while line := self.answer.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                fields[name] = json.loads(value) if name == "data" else value
            elif "event" in fields:
                return fields
        return None

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


@contextmanager
def events(client: Client, path: str, **headers: str) -> Iterator[Events]:
    stream = Events(client, path, **headers)
    try:
        yield stream
    finally:
        stream.close()


def test_what_a_trainer_tells_is_read_step_by_step(hub: CloudHub) -> None:
    job, reader = new_job(hub, "told"), hub.client("me", KeyKind.TRAINER, Scope.JOBS_READ)
    assert reader.get(f"/v1/runs/{job}").json["newest"] is None
    with trainer(hub) as client:
        client.report_progress(job, Epoch(1), [step(0), step(1)])
        client.report_progress(job, Epoch(1), [step(1), step(2)])  # sent again: its answer was lost
    newest = reader.get(f"/v1/runs/{job}").json["newest"]
    assert (newest["step"], newest["number"], newest["tokens_per_second"], newest["epoch"]) == (2, 3, 1024.0, 1)
    first = reader.get(f"/v1/runs/{job}/steps?limit=2").json
    rest = reader.get(f"/v1/runs/{job}/steps?limit=2&after={first['next']}").json
    assert [one["loss"] for one in first["items"] + rest["items"]] == [4.0, 2.0, 4.0 / 3]
    assert rest["next"] is None
    listed = {one["job"]: one for one in reader.get("/v1/runs").json["items"]}
    assert listed[job]["newest"] == newest
    assert hub.jobs["other"] not in listed


def test_only_its_own_trainer_tells_of_a_run(hub: CloudHub) -> None:
    job = new_job(hub, "own")
    with trainer(hub, "other") as stranger, pytest.raises(ControlError, match=f"the hub knows no job {job}"):
        stranger.report_progress(job, Epoch(1), [step(0)])
    token = hub.hub.token(Role.TRAINER, hub.key("me", KeyKind.TRAINER, Scope.JOBS_READ))
    with HubClient(token) as reader, pytest.raises(NotAllowedError):
        reader.report_progress(job, Epoch(1), [step(0)])
    assert hub.client().get(f"/v1/runs/{job}").json["newest"] is None


def test_a_stream_has_what_was_told_and_what_is_told_until_the_job_ends(hub: CloudHub) -> None:
    job, reader = new_job(hub, "streamed"), hub.client("me", KeyKind.TRAINER)
    with trainer(hub) as client:
        client.report_progress(job, Epoch(1), [step(0)])
        with events(reader, f"/v1/runs/{job}/events") as stream:
            assert stream.answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
            first, second = stream.next(), stream.next()
            assert first is not None
            assert second is not None
            assert (first["event"], first["id"], first["data"]["loss"]) == ("step", "1", 4.0)
            assert (second["event"], second["data"]["state"]) == ("run", "running")
            assert b"distensor_http_streams 1.0" in hub.client().get("/metrics").body
            client.report_progress(job, Epoch(1), [step(1)])
            third = stream.next()
            assert third is not None
            assert third["data"]["step"] == 1
            client.end_job(job, JobState.FINISHED, "done")
            last = stream.next()
            assert last is not None
            assert last["data"]["state"] == "finished"
            assert stream.next() is None
    assert b"distensor_http_streams 0.0" in hub.client().get("/metrics").body


def test_who_comes_back_gets_what_it_missed(hub: CloudHub) -> None:
    job, reader = new_job(hub, "again"), hub.client("me", KeyKind.TRAINER)
    with trainer(hub) as client:
        client.report_progress(job, Epoch(1), [step(0), step(1), step(2)])
        client.end_job(job, JobState.FINISHED)
    for headers in ({"Last-Event-ID": "2"}, {"Last-Event-ID": "\xb2", "X": "after"}):
        path = f"/v1/runs/{job}/events" + ("?after=2" if "X" in headers else "")
        with events(reader, path, **headers) as stream:
            told = list(iter(stream.next, None))
        assert [(one["event"], one.get("id")) for one in told] == [("step", "3"), ("run", None)]


def test_a_revoked_key_ends_its_streams(hub: CloudHub) -> None:
    job, reader = new_job(hub, "revoked"), hub.client("me", KeyKind.TRAINER)
    with events(reader, f"/v1/runs/{job}/events") as stream:
        assert stream.next() is not None
        key = reader.get("/v1/me").json["key"]
        assert hub.client().post(f"/v1/keys/{key}/revoke").status == 200
        assert stream.next() is None


def test_steps_that_make_no_sense_are_refused(hub: CloudHub) -> None:
    job = new_job(hub, "wrong")
    with trainer(hub) as client:
        for wrong in (StepProgress(step=1, loss=float("nan"), tokens=1, seconds=1, bytes_sent=0, bytes_received=0),):
            with pytest.raises(ControlError, match="expected finite numbers"):
                client.report_progress(job, Epoch(1), [wrong])
        with pytest.raises(ControlError, match="at most 200"):
            client.report_progress(job, Epoch(1), [step(number) for number in range(201)])


def test_a_hub_keeps_the_newest_steps_of_the_newest_runs() -> None:
    runs = Runs()
    for number in range(MOST_STEPS_KEPT + 5):
        runs.tell(JobId("j"), Epoch(1), [step(number)], at=0.0)
    assert [len(runs.steps(JobId("j"))), runs.steps(JobId("j"))[0].number] == [MOST_STEPS_KEPT, 6]
    with runs.watching(JobId("watched")):
        for number in range(MOST_RUNS + 1):
            runs.tell(JobId(f"other-{number}"), Epoch(1), [step(0)], at=0.0)
        assert JobId("watched") in runs._runs
    assert not runs.steps(JobId("j"))
    assert len(runs._runs) == MOST_RUNS


def test_a_later_epoch_may_begin_at_an_earlier_step() -> None:
    runs = Runs()
    runs.tell(JobId("j"), Epoch(1), [step(0), step(1), step(2)], at=0.0)
    runs.tell(JobId("j"), Epoch(2), [step(1), step(2)], at=1.0)
    assert [(one.epoch, one.progress.step) for one in runs.steps(JobId("j"))] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
