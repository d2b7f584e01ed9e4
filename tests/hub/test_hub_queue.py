"""Jobs that wait: order, turns, quotas, and what is said about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hub_kit import spec
from machine_kit import A, B, Hub, ready, running_job, sent, updates

from distensor.core.control import Assignment, JobSpec, JobState, Reconfiguration
from distensor.core.errors import ControlError, PlacementError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.job_report import JobQuery, JobSummary, jobs_table
from distensor.core.parallel import ParallelConfig
from distensor.hub.accounts import Quota
from distensor.hub.effects import Effect, SaveJob
from distensor.hub.jobs import page_of
from distensor.hub.records import JobRecord


def wish(dp: int = 1, name: str = "job", *, priority: int = 0, wait: bool = True) -> JobSpec:
    return replace(spec(dp, csr="csr", submission=name, name=name), wait=wait, priority=priority)


def saved(effects: Iterable[Effect]) -> list[tuple[JobRecord, bool, bool]]:
    return [(one.job, one.new, one.new_epoch) for one in effects if isinstance(one, SaveJob)]


def names(hub: Hub) -> list[tuple[str, str, int]]:
    return [(job.name, job.state.value, job.position) for job in hub.machine.summaries(None, ended=False)]


def end(hub: Hub, job_id: JobId) -> None:
    hub.machine.end("main", job_id, JobState.FINISHED, "")


def full() -> tuple[Hub, JobId]:
    """Four slots, all taken."""
    hub = Hub()
    job_id, _, _ = running_job(hub)
    return hub, job_id


def test_a_job_that_does_not_fit_is_refused_or_waits_as_it_says() -> None:
    hub, _ = full()
    with pytest.raises(PlacementError, match="0 free slots"):
        hub.submit(wish(2, wait=False))
    job_id, epoch, effects = hub.submit(wish(2))
    [(job, new, _)] = saved(effects)
    assert (job.state, job.ranks, new, epoch) == (JobState.QUEUED, (), True, 1)
    assert not sent(effects, Assignment)
    assert updates(effects)[0].state is JobState.QUEUED
    assert "0 free slots" in updates(effects)[0].reason
    assert hub.submit(wish(2)) == (job_id, epoch, []), "sent again it is the same job"


def test_it_is_placed_as_soon_as_there_is_room_and_only_tried_when_there_may_be() -> None:
    hub, running = full()
    job_id, _, _ = hub.submit(wish(2))
    assert hub.tick(0.5) == []
    end(hub, running)
    effects = hub.tick(0.5)
    [(job, new, new_epoch)] = saved(effects)
    assert (job.state, job.epoch, new, new_epoch, job.reason) == (JobState.PLACED, 1, False, True, "")
    assert len(sent(effects, Assignment)) == 2
    assert [update.state for update in updates(effects)] == [JobState.PLACED]
    for session, message in sent(effects, Assignment):
        assert isinstance(message, Assignment)
        hub.machine.worker_ready(session, ready(job_id, message.rank))
    assert hub.machine.job_of("main", job_id).state is JobState.RUNNING


def test_a_node_that_comes_makes_room_too() -> None:
    hub = Hub()
    hub.submit(wish(1))
    hub.connect(A)
    assert [job.state for job, _, _ in saved(hub.tick(0.5))] == [JobState.PLACED]


def test_a_node_that_takes_work_again_makes_room_too() -> None:
    hub = Hub()
    session = hub.connect(A)
    hub.beat(session, accepting=False)
    hub.submit(wish(1))
    assert not saved(hub.tick(0.5))
    hub.beat(session, accepting=True)
    assert saved(hub.tick(0.5))


def test_the_higher_priority_comes_first_and_then_who_came_first() -> None:
    hub, running = full()
    hub.machine.set_quotas({"main": Quota(priority=5)})
    for name, priority in (("first", 0), ("second", 0), ("urgent", 5)):
        hub.submit(wish(3, name, priority=priority))
    assert names(hub)[:3] == [("urgent", "queued", 1), ("first", "queued", 2), ("second", "queued", 3)]
    end(hub, running)
    hub.tick(0.5)
    assert [name for name, state, _ in names(hub) if state == "placed"] == ["urgent"]


def test_a_small_job_passes_a_large_one_until_that_has_waited_long() -> None:
    hub, running = full()
    large, _, _ = hub.submit(wish(5, "large"))
    end(hub, running)
    _, _, effects = hub.submit(wish(1, "small"))
    assert [(job.name, job.state) for job, _, _ in saved(effects)] == [("small", JobState.PLACED)]

    hub, running = full()
    large, _, _ = hub.submit(wish(4, "large"))
    for _ in range(700):
        hub.machine.heard_trainer(large, hub.now)
        hub.machine.heard_trainer(running, hub.now)
        hub.now += 1.0
    sessions = [hub.connect(A, *[(running, Epoch(1), rank) for rank in (0, 1)])]  # type: ignore[misc]
    sessions.append(hub.connect(B, *[(running, Epoch(1), rank) for rank in (2, 3)]))  # type: ignore[misc]
    with pytest.raises(PlacementError, match="comes after 'large', which has waited longer"):
        hub.submit(wish(1, "impatient", wait=False))
    hub.submit(wish(1, "late"))
    end(hub, running)
    hub.tick(0.5)
    assert names(hub) == [("late", "queued", 1), ("large", "placed", 0)]


def test_a_job_that_waits_and_fits_now_is_not_passed_in_the_moment_before_it_is_placed() -> None:
    hub, running = full()
    hub.submit(wish(4, "large"))
    end(hub, running)
    hub.submit(wish(1, "small"))
    hub.tick(0.5)
    assert names(hub) == [("small", "queued", 1), ("large", "placed", 0)]


def test_a_job_that_no_mesh_of_these_nodes_could_take_holds_nobody_back() -> None:
    hub, running = full()
    huge, _, _ = hub.submit(wish(9, "huge"))
    end(hub, running)
    for _ in range(700):
        hub.machine.heard_trainer(huge, hub.now)
        hub.now += 1.0
    hub.connect(A)
    _, _, effects = hub.submit(wish(2, "small"))
    assert [job.state for job, _, _ in saved(effects)] == [JobState.PLACED]


def test_a_quota_of_workers_lets_a_job_wait_and_holds_nobody_else_back() -> None:
    hub = Hub()
    hub.connect(A), hub.connect(B)
    hub.machine.set_quotas({"main": Quota(workers=2)})
    first, _, _ = hub.submit(wish(2, "first"))
    with pytest.raises(PlacementError, match="needs 1 workers; account main uses 2 for other jobs and may use 2 at"):
        hub.submit(wish(1, "refused", wait=False))
    hub.submit(wish(1, "second"))
    _, _, effects = hub.machine.submit("other", wish(2, "theirs"), hub.now)
    assert [job.state for job, _, _ in saved(effects)] == [JobState.PLACED]
    assert "account main uses 2" in hub.machine.report(JobId("j_3"), hub.now).missing
    end(hub, first)
    hub.tick(0.5)
    assert ("second", "placed", 0) in names(hub)


def next_epoch(hub: Hub, job_id: JobId, continues: tuple[int | None, ...], **more: Any) -> list[Effect]:
    job = hub.machine.job_of("main", job_id)
    change = Reconfiguration(
        job_id=job_id,
        request=f"r{job.epoch}",
        epoch=job.epoch,
        continues=tuple(None if rank is None else Rank(rank) for rank in continues),
        csr_pem="csr",
        **{"parallel": ParallelConfig(data_parallel=len(continues)), **more},
    )
    return hub.machine.reconfigure("main", change, hub.now)[1]


def test_a_job_grows_within_its_quota_only_and_keeps_what_it_has() -> None:
    hub = Hub()
    hub.connect(A), hub.connect(B)
    hub.machine.set_quotas({"main": Quota(workers=3)})
    job_id, _, _ = hub.submit(wish(2, "first"))
    with pytest.raises(PlacementError, match="needs 4 workers; account main uses 0 for other jobs and may use 3 at"):
        next_epoch(hub, job_id, (0, 1, None, None))
    assert len(sent(next_epoch(hub, job_id, (0, 1, None)), Assignment)) == 3
    hub.machine.set_quotas({"main": Quota(workers=1)})
    assert len(sent(next_epoch(hub, job_id, (0, None, 2)), Assignment)) == 3, "the limit became smaller later"
    with pytest.raises(PlacementError, match="may use 1 at once"):
        next_epoch(hub, job_id, (0, 1, 2, None))


def test_aggregators_count_before_and_after_a_job_is_placed() -> None:
    hub = Hub()
    hub.connect(A), hub.connect(B)
    hub.machine.set_quotas({"main": Quota(workers=2)})
    wanted = replace(wish(2, "first", wait=False), aggregators=("atlas-2",))
    with pytest.raises(PlacementError, match="needs 3 workers; account main uses 0 for other jobs and may use 2"):
        hub.submit(wanted)
    job_id, _, _ = hub.submit(wish(2, "second"))
    assert len(sent(next_epoch(hub, job_id, (0, 1), aggregators=("atlas-2",)), Assignment)) == 2, "it goes on without"
    hub.machine.set_quotas({"main": Quota(workers=3)})
    assert len(sent(next_epoch(hub, job_id, (0, 1), aggregators=("atlas-2",)), Assignment)) == 3


def test_a_larger_quota_is_noticed() -> None:
    hub = Hub()
    hub.connect(A)
    hub.machine.set_quotas({"main": Quota(workers=0)})
    hub.submit(wish(1))
    assert not saved(hub.tick(0.5))
    hub.machine.set_quotas({})
    assert saved(hub.tick(0.5))


def test_the_queue_and_the_priority_have_quotas_too() -> None:
    hub, _ = full()
    hub.machine.set_quotas({"main": Quota(waiting=1, priority=2)})
    hub.submit(wish(1, "one", priority=2))
    with pytest.raises(PlacementError, match="account main has 1 jobs in the queue and may have 1"):
        hub.submit(wish(1, "two"))
    with pytest.raises(PlacementError, match="priority 3; account main may ask for at most 2"):
        hub.submit(wish(1, "three", priority=3))


def test_a_waiting_job_can_be_cancelled_and_is_dropped_when_its_trainer_is_gone() -> None:
    hub, running = full()
    one, _, _ = hub.submit(wish(1, "one"))
    two, _, _ = hub.submit(wish(1, "two"))
    hub.machine.end("main", one, JobState.CANCELLED, "changed my mind")
    assert [name for name, _, _ in names(hub)] == ["two", "job"]
    hub.machine.heard_trainer(running, 300.0)
    [(job, _, _)] = saved(hub.tick(301.0))
    assert (job.job_id, job.state) == (two, JobState.FAILED)
    assert "trainer has not been heard of" in job.reason


def test_a_waiting_job_has_no_members_to_change() -> None:
    hub, _ = full()
    job_id, epoch, _ = hub.submit(wish(1))
    change = Reconfiguration(
        job_id=job_id, request="r", epoch=epoch, parallel=ParallelConfig(), continues=(None,), csr_pem="csr"
    )
    with pytest.raises(ControlError, match="waits in the queue"):
        hub.machine.reconfigure("main", change, hub.now)


def test_a_hub_that_restarts_finds_its_queue_in_order() -> None:
    hub, running = full()
    jobs = [saved(hub.submit(wish(4, name))[2])[0][0] for name in ("one", "two")]
    again = Hub(jobs=[hub.machine.job_of("main", running), *jobs])
    assert names(again)[:2] == [("one", "queued", 1), ("two", "queued", 2)]


# What is said


def test_a_report_says_why_each_rank_is_where_it_is_and_why_a_node_has_none() -> None:
    hub = Hub()
    hub.connect(A), hub.connect(B)
    job_id, _, _ = hub.submit(wish(1))
    report = hub.machine.report(job_id, hub.now)
    assert [(one.node, one.device_id) for one in report.ranks] == [("atlas-1", "cpu")]
    assert report.ranks[0].why.startswith("whole replica together: the fastest node with room")
    assert [(one.node, one.why.partition(":")[0]) for one in report.passed] == [("atlas-2", "not needed")]
    assert report.missing == ""
    text = str(report)
    for words in (
        f"job job ({job_id}): placed",
        "1 workers (dp 1 x tp 1 x pp 1 x cp 1) of main",
        "atlas-1",
        "why there",
    ):
        assert words in text


def test_a_report_of_a_waiting_job_says_what_is_missing_now() -> None:
    hub, _ = full()
    job_id, _, _ = hub.submit(wish(3))
    report = hub.machine.report(job_id, hub.now)
    assert "needs 3 workers" in report.missing
    assert {one.node: one.why for one in report.passed} == {"atlas-1": "no free slot", "atlas-2": "no free slot"}
    assert "place 1 in the queue with priority 0" in str(report)


def test_the_reasons_of_a_later_epoch_are_its_own() -> None:
    hub, job_id = full()
    change = Reconfiguration(
        job_id=job_id,
        request="r",
        epoch=Epoch(1),
        parallel=ParallelConfig(data_parallel=1, pipeline_parallel=2),
        continues=(hub.machine.job_of("main", job_id).ranks[2].rank, None),
        csr_pem="csr",
    )
    hub.machine.reconfigure("main", change, hub.now)
    whys = [one.why for one in hub.machine.report(job_id, hub.now).ranks]
    assert whys[0] == "goes on from rank 2 of epoch 1"
    assert "the fastest node with room" in whys[1]


def test_pages_of_jobs_meet_without_a_gap() -> None:
    hub, _ = full()
    for number in range(5):
        hub.submit(wish(1, f"w{number}"))
    found = hub.machine.summaries("main", ended=True)
    seen: list[JobSummary] = []
    query = JobQuery(most=2)
    while True:
        page = page_of(found, query)
        seen += page.jobs
        if not page.more:
            break
        query = replace(query, after=page.jobs[-1].job_id)
    assert seen == found
    assert hub.machine.summaries("other", ended=True) == []
    assert "w4" in jobs_table(tuple(seen))
