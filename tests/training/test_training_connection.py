"""The trainer's end of a job against workers that are only planes, some of them hostile, and a hub that is a list."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transport_kit import JOB, Authority, mesh

from distensor.core import SYSTEM_CLOCK, Epoch, JobId, NodeId, ParallelConfig, Rank
from distensor.core.control import JobState, JobUpdate, Member, Reconfiguration, Topology, WorkerChange, WorkerState
from distensor.core.errors import (
    AuthenticationError,
    DistensorError,
    HubProtocolError,
    HubUnreachableError,
    JobFailedError,
    PlacementError,
    ProgramRejectedError,
    StaleEpochError,
    WorkerFailedError,
    WorkerLostError,
)
from distensor.core.regrouping import Regrouping
from distensor.training.connection import JobConnection, JobWatch, wait_until_running
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.driver import ABORT_SEQUENCE, Command, receive_named, send_named
from distensor.transport.tensors import encode_named

SECONDS = 20.0
DP2 = ParallelConfig(data_parallel=2)
TOPOLOGY = Topology(
    job_id=JOB,
    epoch=Epoch(1),
    job_name="llama",
    parallel=ParallelConfig(data_parallel=2),
    members=tuple(
        Member(rank=Rank(rank), node_id=NodeId(f"n_{rank}"), node_name=name, host="127.0.0.1", port=1)
        for rank, name in enumerate(("atlas", "bolt"))
    ),
)


class Hub:
    """Says what a test puts into it."""

    def __init__(self) -> None:
        self.updates: queue.Queue[JobUpdate | BaseException | None] = queue.Queue()
        self.ended: list[tuple[JobState, str]] = []
        self.away = False
        self.silent = False
        self.changes: dict[str, Reconfiguration] = {}

    def watch_job(self, job_id: JobId) -> Iterator[JobUpdate]:
        while (update := self.updates.get()) is not None:
            if isinstance(update, BaseException):
                raise update
            yield update

    def reconfigure_job(self, change: Reconfiguration) -> Epoch:
        """As the hub does it: once for each request, from the newest epoch only. `silent`: the answer gets lost."""
        if change.request not in self.changes:
            if change.epoch != len(self.changes) + 1:
                raise StaleEpochError(f"epoch {change.epoch}")
            self.changes[change.request] = change
        if self.silent:
            raise HubUnreachableError("no answer")
        return Epoch(2 + list(self.changes).index(change.request))

    def end_job(self, job_id: JobId, state: JobState, reason: str = "", epoch: Epoch | None = None) -> None:
        if self.away:
            raise HubUnreachableError("away")
        self.ended.append((state, reason))


def update(state: JobState = JobState.RUNNING, *workers: WorkerChange, reason: str = "") -> JobUpdate:
    return JobUpdate(
        job_id=JOB, epoch=Epoch(1), state=state, reason=reason, topology=None, certificate=None, workers=workers
    )


def change(rank: int, state: WorkerState, reason: str = "", restarts: int = 0) -> WorkerChange:
    return WorkerChange(job_id=JOB, epoch=Epoch(1), rank=Rank(rank), state=state, reason=reason, restarts=restarts)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.updates.put(None)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def planes(authority: Authority) -> Iterator[dict[int, DataPlane]]:
    with mesh(authority, 2, driver=True) as opened:
        yield opened


@pytest.fixture
def connection(hub: Hub, planes: dict[int, DataPlane]) -> JobConnection:
    return JobConnection(
        client=hub,
        watch=JobWatch(hub, JOB, SYSTEM_CLOCK),
        plane=planes[-1],
        topology=TOPOLOGY,
        clock=SYSTEM_CLOCK,
        exit_reason_seconds=0.2,
        end_seconds=0.5,
    )


def answer(
    planes: Mapping[int, DataPlane],
    rank: int,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    sequence: int = 0,
) -> None:
    send_named(planes[rank], -1, Channel.REPLY, sequence, meta, tensors or {})


OK: dict[str, Any] = {"code": "ok"}


def test_commands_go_to_all_and_answers_come_in_rank_order(
    planes: dict[int, DataPlane], connection: JobConnection
) -> None:
    answer(planes, 1, {**OK, "mine": 1})
    answer(planes, 0, {**OK, "mine": 0}, {"a": torch.arange(3)})
    replies = connection.command(
        Command.STEP, {"step": 4}, {1: {"x": torch.ones(2)}}, {0: {"own": True}}, most_bytes={0: 64}
    )
    assert [reply.meta["mine"] for reply in replies] == [0, 1]
    assert [reply.who for reply in replies] == ["rank 0 on node 'atlas'", "rank 1 on node 'bolt'"]
    assert torch.equal(replies[0].tensors["a"], torch.arange(3))
    meta, _ = receive_named(planes[0], -1, Channel.CONTROL, 0, SECONDS)
    assert meta == {"step": 4, "own": True, "command": "step"}
    meta, tensors = receive_named(planes[1], -1, Channel.CONTROL, 0, SECONDS)
    assert meta == {"step": 4, "command": "step"}
    assert torch.equal(tensors["x"], torch.ones(2))


def test_a_command_to_some_lets_the_others_pass(planes: dict[int, DataPlane], connection: JobConnection) -> None:
    """All ranks number commands alike: a pipeline's messages carry the number of the step's command."""
    for rank in (0, 1):
        answer(planes, rank, OK)
    assert [reply.rank for reply in connection.command(Command.SHARE, {"step": 3}, only=[1])] == [1]
    for rank in (0, 1):
        answer(planes, rank, OK, sequence=1)
    connection.command(Command.STEP, {})
    for rank, said in ((0, {"command": "pass"}), (1, {"command": "share", "step": 3})):
        assert receive_named(planes[rank], -1, Channel.CONTROL, 0, SECONDS)[0] == said
        assert receive_named(planes[rank], -1, Channel.CONTROL, 1, SECONDS)[0] == {"command": "step"}


@pytest.mark.parametrize(
    ("meta", "kind", "says"),
    [
        ({"code": "error", "message": "ValueError: x"}, WorkerFailedError, "ValueError: x"),
        ({"code": "out_of_memory", "message": "too much"}, WorkerFailedError, "too much"),
        ({"code": "refused_program", "message": "op"}, ProgramRejectedError, "op"),
        ({"code": "peer_lost", "message": "gone", "peer": 0}, WorkerLostError, "lost rank 0 on node 'atlas'"),
        ({"code": "peer_lost", "message": "gone", "peer": 99}, WorkerLostError, "lost rank 1 on node 'bolt'"),
        ({"code": "peer_lost", "message": "gone", "peer": "x"}, WorkerLostError, "lost rank 1 on node 'bolt'"),
        ({"code": "peer_lost"}, WorkerLostError, "lost rank 1"),
        ({"code": ["what"]}, WorkerFailedError, "rank 1"),
        ({}, WorkerFailedError, "rank 1 on node 'bolt'"),
        ({"code": "error", "message": {"deep": 1}}, WorkerFailedError, "deep"),
        ({"code": "error", "message": "y" * 100_000}, WorkerFailedError, "yyy"),
    ],
)
def test_a_worker_that_fails_is_named(
    planes: dict[int, DataPlane], connection: JobConnection, meta: dict[str, Any], kind: type[DistensorError], says: str
) -> None:
    answer(planes, 1, meta)
    with pytest.raises(kind, match=says) as caught:
        connection.command(Command.STEP, {})
    assert len(str(caught.value)) < 3000
    assert "rank" in str(caught.value)


def parts(head: Mapping[str, Any], tensors: Mapping[str, Tensor], micro: int = 0, step: int = 0) -> tuple[Any, ...]:
    header, buffers = encode_named(tensors, head)
    return Tag(channel=Channel.REPLY, step=step, micro=micro), header, buffers


BIG = {"a": torch.zeros(100)}
HOSTILE: dict[str, list[tuple[Any, ...]]] = {
    "an answer to no command": [parts({"parts": 1, "meta": OK}, {}, step=7)],
    "a part that is not the first": [parts({"parts": 1, "meta": OK}, {}, micro=3)],
    "not a named message": [(Tag(channel=Channel.REPLY), b"garbage", [])],
    "an empty header": [(Tag(channel=Channel.REPLY), b"", [])],
    "no parts": [parts({"meta": OK}, {})],
    "parts of another type": [parts({"parts": "2", "meta": OK}, {})],
    "too many parts": [parts({"parts": 1 << 30, "meta": OK}, {})],
    "meta of another type": [parts({"parts": 1, "meta": [1]}, {})],
    "tensors that nobody asked for": [parts({"parts": 1, "meta": OK}, BIG)],
    "too much in the second part": [parts({"parts": 3, "meta": OK}, {}), parts({}, BIG, micro=1)],
    "an empty part": [parts({"parts": 3, "meta": OK}, {}), parts({}, {}, micro=1)],
}


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_answer_is_an_error_that_names_the_worker(
    planes: dict[int, DataPlane], connection: JobConnection, messages: list[tuple[Any, ...]]
) -> None:
    for message in messages:
        planes[1].send(-1, *message)
    with pytest.raises(WorkerFailedError, match="rank 1 on node 'bolt'"):
        connection.command(Command.STATE, {})


def test_a_second_answer_of_one_rank_is_an_error(planes: dict[int, DataPlane], connection: JobConnection) -> None:
    answer(planes, 1, OK)
    answer(planes, 1, OK)
    with pytest.raises(WorkerFailedError, match=r"rank 1 on node 'bolt'.*nobody asked for"):
        connection.command(Command.STATE, {})


def test_a_lost_worker_is_named_with_its_supervisors_reason(
    planes: dict[int, DataPlane], connection: JobConnection, hub: Hub
) -> None:
    hub.updates.put(
        update(
            JobState.RUNNING,
            change(0, WorkerState.RUNNING),
            change(1, WorkerState.EXITED, "killed by signal 9 (SIGKILL)"),
        )
    )
    planes[1].close()
    with pytest.raises(WorkerLostError, match=r"'llama' lost rank 1 on node 'bolt': killed by signal 9"):
        connection.command(Command.STEP, {})


def test_a_lost_worker_whose_supervisor_says_nothing_is_named_all_the_same(
    planes: dict[int, DataPlane], connection: JobConnection
) -> None:
    planes[0].close()
    with pytest.raises(WorkerLostError, match=r"lost rank 0 on node 'atlas'.*has given no reason"):
        connection.command(Command.STEP, {})


def test_a_hub_that_refuses_does_not_hide_the_loss(
    planes: dict[int, DataPlane], connection: JobConnection, hub: Hub
) -> None:
    hub.updates.put(AuthenticationError("revoked"))
    planes[0].close()
    with pytest.raises(WorkerLostError, match="rank 0"):
        connection.command(Command.STEP, {})


def test_of_two_that_ended_the_one_that_was_missed_is_named(
    planes: dict[int, DataPlane], connection: JobConnection, hub: Hub
) -> None:
    hub.updates.put(
        update(JobState.RUNNING, change(0, WorkerState.EXITED, "first"), change(1, WorkerState.BACKOFF, "second"))
    )
    planes[1].close()
    with pytest.raises(WorkerLostError, match="rank 1 on node 'bolt': second"):
        connection.command(Command.STEP, {})


def test_a_job_that_ends_well_says_end_and_tells_the_hub(
    planes: dict[int, DataPlane], connection: JobConnection, hub: Hub
) -> None:
    for rank in range(2):
        answer(planes, rank, OK)
    connection.end(JobState.FINISHED)
    connection.end(JobState.FAILED, "too late to matter")
    assert hub.ended == [(JobState.FINISHED, "")]
    for rank in range(2):
        assert receive_named(planes[rank], -1, Channel.CONTROL, 0, SECONDS)[0] == {"command": "end"}


def test_workers_that_do_not_answer_the_end_keep_nobody(connection: JobConnection, hub: Hub) -> None:
    connection.end(JobState.FINISHED)
    assert hub.ended == [(JobState.FINISHED, "")]


def test_a_failed_job_is_aborted_even_without_a_hub(
    planes: dict[int, DataPlane], connection: JobConnection, hub: Hub
) -> None:
    hub.away = True
    connection.end(JobState.FAILED, "why")
    assert receive_named(planes[0], -1, Channel.CONTROL, ABORT_SEQUENCE, SECONDS)[0] == {"command": "abort"}


class TestWatch:
    def test_it_returns_the_update_that_was_wanted(self, hub: Hub) -> None:
        watch = JobWatch(hub, JOB, SYSTEM_CLOCK)
        hub.updates.put(update(JobState.PLACED))
        hub.updates.put(update(JobState.RUNNING))
        found = watch.wait_for(lambda seen: seen.state is JobState.RUNNING, SECONDS)
        assert found is not None
        assert watch.latest == found

    def test_the_time_ends(self, hub: Hub) -> None:
        watch = JobWatch(hub, JOB, SYSTEM_CLOCK)
        assert watch.wait_for(lambda _: True, 0.05) is None
        assert not watch.over

    def test_a_refusal_is_raised(self, hub: Hub) -> None:
        hub.updates.put(AuthenticationError("revoked"))
        with pytest.raises(AuthenticationError):
            JobWatch(hub, JOB, SYSTEM_CLOCK).wait_for(lambda _: True, SECONDS)

    def test_a_watch_that_is_over_keeps_nobody_waiting(self, hub: Hub) -> None:
        watch = JobWatch(hub, JOB, SYSTEM_CLOCK)
        waiting = threading.Thread(target=lambda: watch.wait_for(lambda _: False, 3600.0))
        waiting.start()
        hub.updates.put(None)
        waiting.join(SECONDS)
        assert not waiting.is_alive()
        assert watch.over

    def test_a_bug_in_the_watch_is_raised_where_somebody_waits(self, hub: Hub) -> None:
        hub.updates.put(RuntimeError("a bug"))
        with pytest.raises(HubProtocolError, match="a bug"):
            JobWatch(hub, JOB, SYSTEM_CLOCK).wait_for(lambda _: True, 3600.0)

    def test_a_job_that_does_not_start_says_who_is_late(self, hub: Hub) -> None:
        hub.updates.put(update(JobState.PLACED, change(0, WorkerState.READY), change(1, WorkerState.STARTING)))
        watch = JobWatch(hub, JOB, SYSTEM_CLOCK)
        watch.wait_for(lambda _: True, SECONDS)
        with pytest.raises(PlacementError, match=re.escape("rank 0 ready, rank 1 starting")):
            wait_until_running(watch, JOB, 0.05)

    def test_time_in_the_queue_does_not_count(self, hub: Hub) -> None:
        hub.updates.put(update(JobState.QUEUED, reason="no free slots"))
        watch, ended = JobWatch(hub, JOB, SYSTEM_CLOCK), threading.Event()

        def start() -> None:
            with contextlib.suppress(PlacementError):
                wait_until_running(watch, JOB, 0.1)
            ended.set()

        waiting = threading.Thread(target=start)
        waiting.start()
        assert not ended.wait(0.5), "the job is in the queue"
        hub.updates.put(update(JobState.PLACED))
        assert ended.wait(SECONDS), "its workers have a tenth of a second"
        waiting.join()

    def test_a_job_that_the_hub_gave_up_says_why(self, hub: Hub) -> None:
        hub.updates.put(update(JobState.FAILED, reason="node atlas is gone"))
        with pytest.raises(JobFailedError, match="node atlas is gone"):
            wait_until_running(JobWatch(hub, JOB, SYSTEM_CLOCK), JOB, SECONDS)

    def test_a_watch_that_ends_first_is_no_timeout(self, hub: Hub) -> None:
        hub.updates.put(None)
        with pytest.raises(JobFailedError, match="nothing more"):
            wait_until_running(JobWatch(hub, JOB, SYSTEM_CLOCK), JOB, SECONDS)


ONE_LEFT = Regrouping(parallel=ParallelConfig(data_parallel=1), continues=(Rank(1),))


@pytest.mark.parametrize(
    "again", [ONE_LEFT, Regrouping(parallel=DP2, continues=(Rank(1), None))], ids=["same", "other"]
)
def test_a_change_whose_answer_was_lost_is_sent_again_before_any_other(
    hub: Hub, connection: JobConnection, again: Regrouping
) -> None:
    hub.silent = True
    with pytest.raises(HubUnreachableError):
        connection.ask_for(ONE_LEFT)
    hub.silent = False
    connection.ask_for(again)
    last = list(hub.changes.values())[-1]
    assert (connection.asked_parallel, last.parallel) == (again.parallel, again.parallel)
    assert last.continues == ((Rank(1),) if again is ONE_LEFT else (Rank(0), None)), (
        "by the numbers of the epoch before"
    )
    assert len(hub.changes) == (1 if again is ONE_LEFT else 2)
