"""A job that goes on in a next epoch, with other members: the hub's state machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hub_kit import cpu, info, spec
from machine_kit import NAMES, A, B, Hub, change, ready, running_job, sent, updates

from distensor.comm.messages import Register, Release, TopologyGrant
from distensor.core import ParallelConfig
from distensor.core.control import (
    Assignment,
    DeviceInfo,
    DeviceKind,
    JobState,
    Reconfiguration,
    TakeOver,
    WorkerState,
)
from distensor.core.errors import (
    ControlError,
    PlacementError,
    StaleEpochError,
)
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank
from distensor.hub.effects import SaveJob, Send, SessionId
from distensor.hub.record_json import wish_from_json, wish_to_json


def reconfigure(
    hub: Hub,
    job_id: JobId,
    continues: Sequence[int | None],
    *,
    epoch: int = 1,
    request: str = "r",
    parallel: ParallelConfig | None = None,
) -> Any:
    change = Reconfiguration(
        job_id=job_id,
        request=request,
        epoch=Epoch(epoch),
        parallel=parallel or ParallelConfig(data_parallel=len(continues)),
        continues=tuple(None if rank is None else Rank(rank) for rank in continues),
        csr_pem="driver",
    )
    return hub.machine.reconfigure("main", change, hub.now)


def test_the_rest_goes_on_in_the_next_epoch() -> None:
    hub = Hub()
    job_id, first, second = running_job(hub)
    epoch, effects = reconfigure(hub, job_id, [0, 2, 3])
    assert epoch == 2
    assigned = [(session, one.rank, one.continues) for session, one in sent(effects, Assignment)]  # type: ignore[attr-defined]
    assert assigned == [(first, 0, 0), (second, 1, 2), (second, 2, 3)]
    kinds = [type(effect.message) for effect in effects if isinstance(effect, Send)]
    assert kinds == [Assignment] * 3 + [Release] * 2, "nobody is released before it was told that it goes on"
    (save,) = [effect for effect in effects if isinstance(effect, SaveJob)]
    assert save.new_epoch
    for rank, session in ((0, first), (1, second)):
        hub.machine.worker_ready(session, ready(job_id, rank, epoch=2))
    effects = hub.machine.worker_ready(second, ready(job_id, 2, epoch=2))
    assert updates(effects)[-1].state is JobState.RUNNING
    grants = dict(sent(effects, TopologyGrant))
    assert {grant.topology.epoch for grant in grants.values()} == {2}  # type: ignore[attr-defined]
    assert len(grants[second].certificates) == 2  # type: ignore[attr-defined]


def test_the_same_request_is_the_same_epoch_and_an_old_one_is_refused() -> None:
    hub = Hub()
    job_id, _, _ = running_job(hub)
    assert reconfigure(hub, job_id, [0, 1, 2])[0] == 2
    assert reconfigure(hub, job_id, [0, 1, 2]) == (2, [])
    with pytest.raises(StaleEpochError, match="in epoch 2, not 1"):
        reconfigure(hub, job_id, [0, 1], request="another")
    with pytest.raises(ControlError, match="ranks 0 to 2, not 3"):
        reconfigure(hub, job_id, [3], epoch=2, request="another")


def test_the_place_of_one_that_is_lost_is_free_for_a_new_one() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)  # all four slots are taken
    _, effects = reconfigure(hub, job_id, [0, None, 2, 3])
    new = [(session, one.rank) for session, one in sent(effects, Assignment) if one.continues is None]  # type: ignore[attr-defined]
    assert new == [(first, 1)]


def elsewhere(hub: Hub, node_id: NodeId, device: DeviceInfo, seen_host: str) -> None:
    session = SessionId(next(hub.sessions))
    there = replace(info(NAMES[node_id]), devices=(device,), seen_host=seen_host)
    hub.machine.join(session, node_id, Register(info=there), hub.now)
    hub.beat(session)


def restarted(hub: Hub, job_id: JobId) -> Hub:
    """A hub that found the job in its books."""
    job = hub.machine.job_of("main", job_id)
    return Hub(jobs=[replace(job, wish=wish_from_json(wish_to_json(job.wish)))])


def test_a_later_epoch_keeps_to_the_kinds_of_devices_that_the_job_asked_for() -> None:
    hub = Hub()
    hub.connect(A)
    job_id, _, _ = hub.submit(replace(spec(2, csr="driver"), device_kinds=(DeviceKind.CPU,)))
    hub = restarted(hub, job_id)
    hub.connect(A)
    elsewhere(hub, B, replace(cpu(2), device_id=DeviceId("cuda:0"), kind=DeviceKind.CUDA), "")
    with pytest.raises(PlacementError, match="0 free slots of kind cpu"):
        reconfigure(hub, job_id, [0, 1, None])


def test_a_later_epoch_splits_a_tensor_group_over_sites_where_the_job_says_so() -> None:
    both = ParallelConfig(tensor_parallel=2)
    for split in (True, False):
        hub = Hub()
        elsewhere(hub, A, cpu(2), "")
        wanted = replace(spec(csr="driver"), parallel=both, split_tensor=split)
        job_id, _, _ = hub.submit(wanted)
        hub = restarted(hub, job_id)
        elsewhere(hub, A, cpu(1), "")
        elsewhere(hub, B, cpu(1), "198.51.100.7")
        if split:
            new = [one.rank for _, one in sent(reconfigure(hub, job_id, [None, None], parallel=both)[1], Assignment)]  # type: ignore[attr-defined]
            assert new == [0, 1]
        else:
            with pytest.raises(PlacementError, match="fits on no node and no site"):
                reconfigure(hub, job_id, [None, None], parallel=both)


def test_without_a_place_nothing_changes() -> None:
    hub = Hub()
    job_id, first, _ = running_job(hub)
    with pytest.raises(PlacementError, match="needs 1 workers"):
        reconfigure(hub, job_id, [0, 1, 2, 3, None])
    assert hub.machine.worker_changed(first, change(job_id, 0, WorkerState.RUNNING)), "epoch 1 is the present one"


def test_a_later_epoch_does_not_fail_for_a_worker_that_does_not_come() -> None:
    """Its trainer is told, and chooses other members; a trainer that is silent ends the job as always."""
    hub = Hub()
    job_id, first, _ = running_job(hub)
    reconfigure(hub, job_id, [0, 1])
    effects = hub.machine.worker_changed(first, change(job_id, 1, WorkerState.BROKEN, epoch=2, reason="no disk"))
    assert updates(effects)[-1].state is JobState.PLACED
    assert updates(effects)[-1].workers[-1].reason == "no disk"
    hub.machine.heard_trainer(job_id, hub.now + 119)
    assert not [one for one in updates(hub.tick(121)) if one.state.ended]


def test_a_message_of_the_epoch_before_is_answered_with_a_release() -> None:
    hub = Hub()
    job_id, _, second = running_job(hub)
    reconfigure(hub, job_id, [0, 1])
    effects = hub.machine.worker_ready(second, ready(job_id, 3))
    assert [release.epoch for _, release in sent(effects, Release)] == [1]  # type: ignore[attr-defined]


def test_a_node_that_was_away_meanwhile_hears_of_the_new_epoch_before_its_workers_are_released() -> None:
    hub = Hub()
    job_id, _, second = running_job(hub)
    hub.machine.leave(second, hub.now)
    reconfigure(hub, job_id, [0, 1, 2])
    _, effects = hub.join(B, (job_id, Epoch(1), Rank(2)), (job_id, Epoch(1), Rank(3)))
    kinds = [type(effect.message) for effect in effects if isinstance(effect, Send)]
    assert kinds.index(Assignment) < kinds.index(Release)
    assert [one.continues for _, one in sent(effects, Assignment)] == [2]  # type: ignore[attr-defined]


def test_a_trainer_that_was_started_again_goes_on_with_the_same_ranks() -> None:
    hub = Hub()
    job_id, first, second = running_job(hub)
    taken = TakeOver(job_id=job_id, request="again", csr_pem="driver")
    with pytest.raises(ControlError, match=f"^the hub knows no job {job_id}$"):
        hub.machine.take_over("somebody", taken, hub.now)
    epoch, effects = hub.machine.take_over("main", taken, hub.now)
    assert epoch == 2
    assigned = [(session, one.rank, one.continues) for session, one in sent(effects, Assignment)]  # type: ignore[attr-defined]
    assert assigned == [(first, 0, 0), (first, 1, 1), (second, 2, 2), (second, 3, 3)]
    assert hub.machine.take_over("main", taken, hub.now) == (2, []), "the same request is the same epoch"
    with pytest.raises(StaleEpochError, match="in epoch 2, not 1"):
        hub.machine.end("main", job_id, JobState.FAILED, "the trainer before woke up", Epoch(1))
    assert updates(hub.machine.end("main", job_id, JobState.FINISHED, "", Epoch(2)))[-1].state is JobState.FINISHED
    with pytest.raises(ControlError, match="is finished"):
        hub.machine.take_over("main", TakeOver(job_id=job_id, request="late", csr_pem="driver"), hub.now)
