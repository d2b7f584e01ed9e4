"""The hub's state machine: no process, no socket, time is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hub_kit import info, spec
from machine_kit import A, B, Hub, change, connected, ready, running_job, sent, updates

from distensor.comm.messages import Heartbeat, HeartbeatAnswer, Register, Rejected, Release, TopologyGrant
from distensor.core.control import (
    Assignment,
    JobState,
    WorkerState,
)
from distensor.core.errors import (
    ConfigError,
    ControlError,
    HubProtocolError,
    PlacementError,
)
from distensor.core.ids import Epoch, Generation, JobId, NodeId, Rank
from distensor.hub.effects import Disconnect, Publish, SaveInfo, SaveJob, SaveRank, Send, SessionId, SpendToken
from distensor.hub.membership import MOST_BEATS, Membership
from distensor.hub.records import NodeRecord

# Membership


def test_connected_only_after_a_heartbeat_was_answered() -> None:
    hub = Hub()
    session, _ = hub.join(A)
    assert connected(hub.mesh()) == {"atlas-1": False, "atlas-2": False}
    effects = hub.beat(session)
    assert [message.sequence for _, message in sent(effects, HeartbeatAnswer)] == [1]  # type: ignore[attr-defined]
    assert connected(hub.mesh()) == {"atlas-1": True, "atlas-2": False}
    assert hub.mesh().available_workers == 2


def test_three_silent_heartbeats_and_a_node_is_not_available() -> None:
    hub = Hub()
    session = hub.connect(A)
    hub.now += 5.9
    assert hub.mesh().available_workers == 2
    hub.now += 0.2
    assert hub.mesh().available_workers == 0
    with pytest.raises(PlacementError):
        hub.submit(spec())
    hub.beat(session)
    assert hub.mesh().available_workers == 2


def test_a_stream_that_is_silent_for_long_is_ended() -> None:
    hub = Hub()
    session = hub.connect(A)
    assert hub.tick(11.9) == []
    (ended,) = [effect for effect in hub.tick(0.2) if isinstance(effect, Disconnect)]
    assert (ended.session, ended.why.code) == (session, "silent")
    assert hub.beat(session) == [], "what the old stream still says is nothing"


def test_an_open_stream_that_closes_is_seen_at_once() -> None:
    hub = Hub()
    session = hub.connect(A)
    hub.machine.leave(session, hub.now)
    assert hub.mesh().available_workers == 0
    assert hub.machine.leave(session, hub.now) == []


def test_the_newer_stream_of_a_node_wins() -> None:
    hub = Hub()
    old = hub.connect(A)
    new, effects = hub.join(A)
    why = Rejected(code="replaced", reason="this node has connected again with the same credential")
    assert Disconnect(session=old, why=why) in effects
    hub.beat(new)
    hub.machine.leave(old, hub.now)
    assert hub.mesh().available_workers == 2, "the end of the old stream is no end of the node"


def test_a_restarted_node_is_one_row_not_two() -> None:
    hub = Hub()
    for _ in range(3):
        hub.machine.leave(hub.connect(A), hub.now)
    hub.connect(A)
    assert [node.info.name for node in hub.mesh().nodes] == ["atlas-1", "atlas-2"]


def test_a_node_that_accepts_nothing_offers_nothing() -> None:
    hub = Hub()
    session = hub.connect(A)
    hub.beat(session, accepting=False)
    (first, _) = hub.mesh().nodes
    assert (first.connected, first.free_slots) == (True, 0)


def test_a_new_description_is_kept_and_the_same_one_is_not_written_again() -> None:
    hub = Hub()
    session, effects = hub.join(A, slots=2)
    assert not [effect for effect in effects if isinstance(effect, SaveInfo)]
    changed = Heartbeat(sequence=1, info=info("atlas-1", slots=5))
    effects = hub.machine.beat(session, changed, hub.now, 0.0)
    assert [effect.info.devices[0].slots for effect in effects if isinstance(effect, SaveInfo)] == [5]
    assert hub.mesh().available_workers == 5


def test_the_join_token_is_spent_at_the_first_heartbeat_of_a_stream() -> None:
    hub = Hub()
    session, _ = hub.join(A)
    assert any(isinstance(effect, SpendToken) for effect in hub.beat(session))
    assert not any(isinstance(effect, SpendToken) for effect in hub.beat(session))


# Jobs


def test_a_submission_places_saves_and_assigns() -> None:
    hub = Hub()
    first, second = hub.connect(A), hub.connect(B)
    job_id, epoch, effects = hub.submit(spec(2, 2, csr="driver"))
    (saved,) = [effect for effect in effects if isinstance(effect, SaveJob)]
    assert (saved.new, saved.job.state, epoch) == (True, JobState.PLACED, 1)
    assert saved.job.driver_certificate_pem == f"signed driver for {job_id}/1/-1"
    assert [(session, message.rank) for session, message in sent(effects, Assignment)] == [  # type: ignore[attr-defined]
        (first, 0),
        (first, 1),
        (second, 2),
        (second, 3),
    ]
    assert hub.mesh().available_workers == 0


def test_the_same_submission_is_the_same_job_also_after_its_end() -> None:
    hub = Hub()
    hub.connect(A)
    job_id, epoch, _ = hub.submit(spec())
    assert hub.submit(spec()) == (job_id, epoch, [])
    hub.machine.end("main", job_id, JobState.FINISHED, "")
    assert hub.submit(spec()) == (job_id, epoch, [])
    assert hub.submit(spec(submission="other"))[0] != job_id


def test_all_ready_sends_each_node_its_own_certificates() -> None:
    hub = Hub()
    first, second = hub.connect(A), hub.connect(B)
    job_id, _, _ = hub.submit(spec(2, 2, csr="driver"))
    for rank, session in ((3, second), (0, first), (1, first)):
        effects = hub.machine.worker_ready(session, ready(job_id, rank))
        assert not sent(effects, TopologyGrant)
        assert [one.state for one in updates(effects)] == [JobState.PLACED]
    effects = hub.machine.worker_ready(second, ready(job_id, 2))
    grants = dict(sent(effects, TopologyGrant))
    assert [one.rank for one in grants[first].certificates] == [0, 1]  # type: ignore[attr-defined]
    assert [one.certificate_pem for one in grants[second].certificates] == [  # type: ignore[attr-defined]
        f"signed csr for {job_id}/1/2 anew",
        f"signed csr for {job_id}/1/3 anew",
    ]
    (update,) = updates(effects)
    assert update.topology is not None
    assert [(member.node_name, member.port) for member in update.topology.members] == [
        ("atlas-1", 4000),
        ("atlas-1", 4001),
        ("atlas-2", 4002),
        ("atlas-2", 4003),
    ]
    assert update.certificate is not None
    assert update.certificate.certificate_pem == f"signed driver for {job_id}/1/-1 anew"


def test_a_worker_that_restarts_is_told_to_the_trainer_and_no_topology_is_sent_again() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)
    reason = "killed by signal 9 (SIGKILL)"
    (update,) = updates(hub.machine.worker_changed(first, change(job_id, 1, WorkerState.EXITED, reason=reason)))
    assert update.state is JobState.RUNNING
    assert (update.workers[1].state, update.workers[1].reason) == (WorkerState.EXITED, reason)
    effects = hub.machine.worker_ready(first, ready(job_id, 1, port=4999))
    assert not sent(effects, TopologyGrant)
    assert updates(effects)[0].workers[1].state is WorkerState.READY


def test_the_same_news_twice_is_no_news() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)
    news = change(job_id, 0, WorkerState.RUNNING)
    assert hub.machine.worker_changed(first, news)
    assert hub.machine.worker_changed(first, news) == []


def test_a_worker_that_cannot_start_fails_a_job_that_has_not_begun() -> None:
    hub = Hub()
    session = hub.connect(A)
    job_id, _, _ = hub.submit(spec())
    news = change(job_id, 0, WorkerState.BROKEN, reason="ended 5 times with status 70")
    effects = hub.machine.worker_changed(session, news)
    (update,) = updates(effects)
    assert update.state is JobState.FAILED
    assert update.reason == "the worker of rank 0 cannot be started: ended 5 times with status 70"
    assert sent(effects, Release)
    assert hub.mesh().available_workers == 2


def test_a_bad_certificate_request_fails_the_job_by_rank() -> None:
    hub = Hub()
    session = hub.connect(A)
    job_id, _, _ = hub.submit(spec(1, 2))
    (update,) = updates(hub.machine.worker_ready(session, ready(job_id, 1, csr="bad")))
    assert (update.state, update.reason[:6]) == (JobState.FAILED, "rank 1")


def test_a_bad_request_of_the_driver_places_nothing() -> None:
    hub = Hub()
    hub.connect(A)
    with pytest.raises(HubProtocolError):
        hub.submit(spec(csr="bad"))
    assert hub.mesh().available_workers == 2


def test_a_lower_epoch_is_refused_and_its_workers_released() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)
    job = hub.machine.job_of("main", job_id)
    later = Hub(jobs=[replace(job, epoch=Epoch(3))])
    session = later.connect(A, *[(job_id, Epoch(3), Rank(rank)) for rank in (0, 1)])
    for effects in (
        later.machine.worker_ready(session, ready(job_id, 0, epoch=2)),
        later.machine.worker_changed(session, change(job_id, 0, WorkerState.EXITED, epoch=2)),
    ):
        release = Release(job_id=job_id, epoch=Epoch(2), reason="the job's epoch is 3, not 2")
        assert effects == [Send(session=session, message=release)]
    assert first


def test_a_node_does_not_speak_for_ranks_of_another() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)
    for effects in (
        hub.machine.worker_ready(first, ready(job_id, 2, port=1)),
        hub.machine.worker_changed(first, change(job_id, 3, WorkerState.BROKEN)),
        hub.machine.worker_changed(first, change(job_id, 99, WorkerState.BROKEN)),
    ):
        assert not [effect for effect in effects if isinstance(effect, (SaveRank, SaveJob, Publish))]


def test_ending_a_job_releases_its_nodes_once() -> None:
    hub = Hub()
    job_id, first, second = running_job(hub)
    effects = hub.machine.end("main", job_id, JobState.FINISHED, "500 steps done")
    assert [session for session, _ in sent(effects, Release)] == [first, second]
    assert updates(effects)[0].reason == "500 steps done"
    assert hub.machine.end("main", job_id, JobState.CANCELLED, "again") == []
    assert hub.machine.job_of("main", job_id).state is JobState.FINISHED
    assert hub.mesh().available_workers == 4


def test_only_the_owner_ends_a_job_and_only_with_an_end() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    with pytest.raises(ControlError, match=f"^the hub knows no job {job_id}$"):
        hub.machine.end("mallory", job_id, JobState.CANCELLED, "")
    with pytest.raises(ConfigError, match="running"):
        hub.machine.end("main", job_id, JobState.RUNNING, "")
    with pytest.raises(ControlError, match="j_none"):
        hub.machine.end("main", JobId("j_none"), JobState.CANCELLED, "")


# Nodes that come back, and time


def test_a_node_that_comes_back_gets_what_it_missed() -> None:
    hub = Hub()
    session = hub.connect(A)
    hub.machine.leave(session, hub.now)
    hub.connect(B)
    job_id, epoch, _ = hub.submit(spec(1, 2))
    ended, effects = hub.join(A, (job_id, epoch, Rank(0)))
    assert not effects or not sent(effects, Assignment), "the ranks are on the other node"
    hub.beat(ended)


def test_an_assignment_that_was_missed_is_sent_again() -> None:
    hub = Hub()
    hub.connect(A)
    job_id, epoch, _ = hub.submit(spec(1, 2))
    _, effects = hub.join(A, (job_id, epoch, Rank(1)))
    assert [message.rank for _, message in sent(effects, Assignment)] == [0]  # type: ignore[attr-defined]


def test_a_topology_that_was_missed_is_sent_again() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    _, effects = hub.join(A, *[(job_id, Epoch(1), Rank(rank)) for rank in (0, 1)])
    (grant,) = [message for _, message in sent(effects, TopologyGrant)]
    assert len(grant.topology.members) == 4  # type: ignore[attr-defined]


def test_members_hear_of_all_addresses_and_of_the_relay() -> None:
    hub = Hub(relay="192.0.2.9:50052")
    job_id, _, _ = running_job(hub)
    session = SessionId(next(hub.sessions))
    told = replace(info("atlas-1"), hosts=("192.168.1.5", "2001:db8::1"), seen_host="198.51.100.7")
    running = tuple((job_id, Epoch(1), Rank(rank)) for rank in (0, 1))
    hub.machine.join(session, A, Register(info=told, running=running), hub.now)
    later = replace(told, hosts=("192.168.1.6",), seen_host="")  # the next heartbeat: a new address at home
    hub.machine.beat(session, Heartbeat(sequence=1, info=later), hub.now, 0.0)
    _, effects = hub.join(B, *((job_id, Epoch(1), Rank(rank)) for rank in (2, 3)))
    (grant,) = [message for _, message in sent(effects, TopologyGrant)]
    assert isinstance(grant, TopologyGrant)
    assert grant.topology.relay == "192.0.2.9:50052"
    assert grant.topology.members[0].host == "127.0.0.1"
    assert grant.topology.members[0].hosts == ("192.168.1.6", "198.51.100.7")
    assert grant.topology.members[2].hosts == ()


def test_a_node_that_comes_back_without_its_worker_has_lost_it() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    _, effects = hub.join(A, (job_id, Epoch(1), Rank(0)))
    (update,) = updates(effects)
    assert update.workers[1].state is WorkerState.EXITED
    assert update.workers[1].reason == "its node came back without it"


def test_what_a_node_still_runs_of_an_ended_or_unknown_job_is_released() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    hub.machine.end("main", job_id, JobState.CANCELLED, "stopped by hand")
    _, effects = hub.join(A, (job_id, Epoch(1), Rank(0)), (JobId("j_old"), Epoch(9), Rank(0)))
    assert [message for _, message in sent(effects, Release)] == [
        Release(job_id=job_id, epoch=Epoch(1), reason="stopped by hand"),
        Release(job_id=JobId("j_old"), epoch=Epoch(9), reason="the hub knows no such job"),
    ]


def test_a_restarted_hub_goes_on_with_its_jobs() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    restarted = Hub(jobs=[hub.machine.job_of("main", job_id)], now=5.0)
    restarted.connect(A, (job_id, Epoch(1), Rank(0)), (job_id, Epoch(1), Rank(1)))
    restarted.connect(B, (job_id, Epoch(1), Rank(2)), (job_id, Epoch(1), Rank(3)))
    assert restarted.machine.job_of("main", job_id).state is JobState.RUNNING
    assert restarted.mesh().available_workers == 0
    assert restarted.submit(spec(2, 2, csr="driver")) == (job_id, 1, [])


def test_a_node_gone_for_long_fails_a_job_that_has_not_begun_and_no_other() -> None:
    hub = Hub()
    running, first, _ = running_job(hub)
    hub.machine.leave(first, hub.now)
    hub.machine.heard_trainer(running, hub.now)
    assert not updates(hub.tick(31))
    placed = Hub()
    session = placed.connect(A)
    placed.submit(spec())
    placed.machine.leave(session, placed.now)
    assert not updates(placed.tick(30))
    (update,) = updates(placed.tick(1))
    assert update.state is JobState.FAILED
    assert update.reason == "node atlas-1 of rank 0 has been gone for 31 s"


def test_workers_that_are_never_ready_fail_the_job_by_name() -> None:
    hub = Hub()
    session = hub.connect(A)
    job_id, _, _ = hub.submit(spec(1, 2))
    hub.machine.worker_ready(session, ready(job_id, 0))
    for _ in range(30):
        hub.tick(4)
        hub.beat(session)
        hub.machine.heard_trainer(job_id, hub.now)
    job = hub.machine.job_of("main", job_id)
    assert (job.state, job.reason) == (JobState.FAILED, "workers were not ready within 120 s: rank 1 on atlas-1")


def test_a_trainer_that_vanished_does_not_hold_its_slots_for_ever() -> None:
    hub = Hub()
    job_id, first, second = running_job(hub)
    for _ in range(100):
        hub.tick(3)
        hub.beat(first)
        hub.beat(second)
    job = hub.machine.job_of("main", job_id)
    assert (job.state, job.reason) == (JobState.FAILED, "the trainer has not been heard of for 300 s")
    assert hub.mesh().available_workers == 4


def test_memory_does_not_grow_with_jobs_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distensor.hub.machine.MOST_ENDED", 5)
    hub = Hub()
    hub.connect(A)
    for number in range(20):
        job_id, _, _ = hub.submit(spec(submission=f"s{number}"))
        hub.machine.end("main", job_id, JobState.FINISHED, "")
    assert len(hub.machine._jobs) == 5
    assert hub.submit(spec(submission="s0"))[0] == "j_1", "a repeated submission is the same job for ever"


def test_many_nodes_beat_less_often_and_are_waited_for_longer() -> None:
    """Together they beat MOST_BEATS times a second."""
    records = [
        NodeRecord(node_id=NodeId(f"n_{n}"), secret_hash=str(n), info=replace(info(f"n{n}"), node_id=NodeId(f"n_{n}")))
        for n in range(int(MOST_BEATS) * 5)
    ]
    few = Membership(generation=Generation(1), nodes=records[:10], heartbeat=2.0, silent_beats=3, now=0.0)
    many = Membership(generation=Generation(1), nodes=records, heartbeat=2.0, silent_beats=3, now=0.0)
    assert (few.heartbeat, many.heartbeat) == (2.0, 5.0)
    for members, until in ((few, 6.0), (many, 15.0)):
        members.join(SessionId(1), NodeId("n_0"), records[0].info, 0.0)
        members.beat(SessionId(1), Heartbeat(sequence=1), 0.0, 0.0)
        assert len(members.offers({}, until - 0.1)) == 1
        assert len(members.offers({}, until)) == 0
        assert members.drop_silent(2 * until - 0.1) == []
        assert members.drop_silent(2 * until) != []
