"""The picture of the node as the dashboard gets it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from server_fakes import assignment, topology

from distensor.comm import LinkError, LinkState, LinkStatus
from distensor.core.control import Assignment, DeviceKind, Earnings, WorkerState
from distensor.core.ids import DeviceId, NodeId
from distensor.core.reading import Unavailable
from distensor_server.devices.model import FACTS, LISTS, NUMBERS, Device, DeviceProcess
from distensor_server.lifecycle import Life
from distensor_server.messages import Progress, ReplicaBytes
from distensor_server.nodestate import NodeState, gates, node_state
from distensor_server.picture import Hold, HoldKind, JobRecord, LoggedEvent, Picture, WorkerView
from distensor_server.rates import LinkRate
from distensor_server.sections import build_sections, changed_sections

S = WorkerState
CONNECTED = LinkStatus(state=LinkState.CONNECTED, address="hub:50051", since=5.0, rtt_ms=23.456, node_id=NodeId("n_1"))
OFFLINE = replace(
    CONNECTED,
    state=LinkState.OFFLINE,
    rtt_ms=Unavailable(reason="not connected"),
    next_retry_at=50.0,
    error=LinkError(code="unreachable", message="no hub answers", fix="check the address"),
)
REJECTED = replace(OFFLINE, state=LinkState.REJECTED)
CONNECTING = LinkStatus(state=LinkState.CONNECTING, address="", since=0.0)
CPU = Device(device_id=DeviceId("cpu"), kind=DeviceKind.CPU, name="CPU", slots=2, memory_total=100, memory_used=40)
NO_CPU = replace(CPU, slots=0, unusable="--cpu-workers 0")
WEDGED = replace(NO_CPU, device_id=DeviceId("cuda"), kind=DeviceKind.CUDA, unusable="NVML error 999", fault=True)


def progress(step: int, loss: float | None = 2.5) -> Progress:
    return Progress(
        phase="training",
        step=step,
        total_steps=10,
        stages=(0,),
        loss=loss,
        tokens_per_second=64.0,
        compute_s=0.1,
        sync_s=0.2,
        wait_s=0.3,
        links=(),
        rss=5,
    )


def worker(state: WorkerState = S.RUNNING, *, rank: int = 0, epoch: int = 1, **more: Any) -> WorkerView:
    given: Assignment = assignment(rank, epoch=epoch)
    life = Life(state=state, restarts=more.pop("restarts", 0), last_exit=more.pop("last_exit", ""))
    values: dict[str, Any] = {"since": 7.0, "pid": 99, "progress": None, "links": (), "rss": 5, **more}
    return WorkerView(worker_id=given.worker_id, assignment=given, life=life, **values)


def job(**more: Any) -> JobRecord:
    first = assignment(0)
    return JobRecord(job_id=first.job_id, name=first.job_name, epoch=first.epoch, first=first, **more)


def picture(**more: Any) -> Picture:
    values: dict[str, Any] = {
        "name": "atlas-3",
        "version": "0.1.0",
        "now": 10.0,
        "started_at": 1.0,
        "detected": True,
        "stopping": None,
        "hold": None,
        "link": CONNECTED,
        "devices": (CPU,),
        "workers": (),
        "jobs": (),
        "earnings": Earnings(confirmed_micro=4000, confirmed_units=2, pending_units=1),
        "earnings_at": 9.0,
        "today_micro": 1000,
        **more,
    }
    return Picture(**values)


PAUSE = Hold(kind=HoldKind.PAUSE, until=99.0)


def test_what_replicas_cost_is_a_workers() -> None:
    cost = ReplicaBytes(how="distro", up=10, down=30, ring=4000)
    here = worker(progress=replace(progress(3), replicas=cost))
    found = build_sections(picture(workers=(here,)), 0.0)["workers"][0]["replicas"]
    assert found == {"how": "distro", "up": 10, "down": 30, "ring": 4000}


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (NodeState.IDLE, {}),
        (NodeState.EARNING, {"workers": (worker(),)}),
        (NodeState.EARNING, {"workers": (worker(), worker(S.STARTING, rank=1))}),
        (NodeState.STARTING, {"workers": (worker(S.STARTING),)}),
        (NodeState.STARTING, {"detected": False, "link": CONNECTING}),
        (NodeState.STARTING, {"link": CONNECTING}),
        (NodeState.OFFLINE, {"link": OFFLINE}),
        (NodeState.OFFLINE, {"link": REJECTED}),
        (NodeState.OFFLINE, {"link": replace(OFFLINE, state=LinkState.CONNECTING)}),
        (NodeState.DEGRADED, {"link": OFFLINE, "workers": (worker(),)}),
        (NodeState.DEGRADED, {"workers": (worker(S.BROKEN),)}),
        (NodeState.DEGRADED, {"workers": (worker(), worker(S.BACKOFF, rank=1))}),
        (NodeState.DEGRADED, {"workers": (worker(S.READY, restarts=1),)}),
        (NodeState.EARNING, {"workers": (worker(S.RUNNING, restarts=1),)}),
        (NodeState.IDLE, {"workers": (worker(S.EXITED),)}),
        (NodeState.DEGRADED, {"devices": (WEDGED, CPU)}),
        (NodeState.WAITING, {"devices": (NO_CPU,)}),
        (NodeState.PAUSED, {"hold": PAUSE}),
        (NodeState.PAUSED, {"hold": PAUSE, "link": OFFLINE}),
        (NodeState.DRAINING, {"hold": PAUSE, "workers": (worker(S.DRAINING),)}),
        (NodeState.DRAINING, {"stopping": "SIGTERM", "workers": (worker(),)}),
    ],
)
def test_one_word_for_the_node(expected: NodeState, given: dict[str, Any]) -> None:
    assert node_state(picture(**given)) is expected


@pytest.mark.parametrize("given", [{}, {"hold": PAUSE}, {"link": OFFLINE}, {"devices": (WEDGED,)}, {"stopping": "x"}])
def test_every_gate_is_always_listed_in_the_same_order(given: dict[str, Any]) -> None:
    assert [gate.gate for gate in gates(picture(**given))] == ["user_pause", "devices", "hub", "workers"]


def test_gates_say_what_was_read_and_when_it_may_change() -> None:
    user, devices, hub, workers = gates(
        picture(
            hold=PAUSE,
            link=OFFLINE,
            devices=(WEDGED,),
            workers=(worker(S.BROKEN, last_exit="killed by signal 9 (SIGKILL)"),),
        )
    )
    assert (user.open, user.reading, user.next_change_at) == (False, "paused by the owner, for a time", 99.0)
    assert (devices.open, devices.reading) == (False, "0 of 1 usable; cuda: NVML error 999")
    assert (hub.open, hub.reading, hub.next_change_at) == (False, "offline: no hub answers", 50.0)
    assert (workers.open, workers.reading) == (False, "w_j_1_1_0 broken (killed by signal 9 (SIGKILL))")
    assert workers.limit == "broken ones start again by `distensor retry`"
    waiting = gates(picture(workers=(worker(S.BACKOFF, retry_at=70.0), worker(S.BACKOFF, rank=1, retry_at=60.0))))[-1]
    assert (waiting.open, waiting.limit, waiting.next_change_at) == (False, "", 60.0)


RUNNING = picture(
    workers=(
        worker(
            progress=progress(4),
            links=(
                LinkRate(
                    peer=-1,
                    sent=10,
                    received=20,
                    sent_rate=1.26,
                    received_rate=None,
                    rtt_ms=3.251,
                    rtt_age_s=29.0,
                    path="relay",
                    line_rate=1.25e6,
                ),
            ),
        ),
        worker(
            S.EXITED, rank=1, pid=None, rss=None, last_exit="killed by signal 9 (SIGKILL)", progress=progress(5, None)
        ),
    ),
    jobs=(job(topology=topology(), units=7),),
    events=(LoggedEvent(at=1.0, severity="info", source="hub", text="[00] x"),),
)


UNREAD = {*NUMBERS, *FACTS, *LISTS} - {"memory_used", "memory_total"}


def test_all_sections_word_for_word() -> None:
    sections = build_sections(RUNNING, state_since=8.0)
    assert sections == json.loads(json.dumps(sections, allow_nan=False))
    assert list(sections) == ["node", "hub", "devices", "workers", "jobs", "earnings", "events", "faults"]
    assert sections["node"] == {
        "id": "n_1",
        "name": "atlas-3",
        "version": "0.1.0",
        "state": "EARNING",
        "state_since": 8.0,
        "started_at": 1.0,
        "why": sections["node"]["why"],
    }
    assert sections["node"]["why"][0] == {
        "gate": "user_pause",
        "open": True,
        "reading": "not paused",
        "limit": "",
        "next_change_at": None,
        "device": None,
        "state": "open",
        "since": None,
    }
    assert sections["hub"] == {
        "state": "connected",
        "address": "hub:50051",
        "rtt_ms": 23.5,
        "clock_skew_s": None,
        "since": 5.0,
        "next_retry_at": None,
        "error": None,
    }
    assert sections["devices"] == [
        {
            "id": "cpu",
            "kind": "cpu",
            "name": "CPU",
            "usable": True,
            "reason": None,
            "fault": False,
            "slots": 2,
            "parent": None,
            "profile": None,
            "unified_memory": False,
            **dict.fromkeys(UNREAD),
            "memory_used": 40,
            "memory_total": 100,
            "benchmark": None,
            "workers": ["w_j_1_1_0"],
            "unavailable": dict.fromkeys(UNREAD, "not read yet"),
        }
    ]
    assert sections["workers"][0] == {
        "id": "w_j_1_1_0",
        "job": "j_1",
        "job_name": "tiny",
        "epoch": 1,
        "rank": 0,
        "stages": [0],
        "device": "cpu",
        "state": "running",
        "pid": 99,
        "step": 4,
        "loss": 2.5,
        "tokens_per_second": 64.0,
        "compute_s": 0.1,
        "sync_s": 0.2,
        "wait_s": 0.3,
        "restarts": 0,
        "last_exit": None,
        "rss": 5,
        "since": 7.0,
        "failures": 0,
        "retry_at": None,
        "replicas": None,
    }
    assert sections["jobs"] == [
        {
            "id": "j_1",
            "name": "tiny",
            "state": "running",
            "epoch": 1,
            "step": 5,
            "total_steps": 10,
            "loss": 2.5,
            "tokens_per_second": 64.0,
            "parallel": {"dp": 1, "tp": 1, "pp": 2, "cp": 1, "order": "tp-cp-pp-dp"},
            "members": [
                {"rank": 0, "node_id": "n_1", "node": "node-1", "dp": 0, "tp": 0, "pp": 0, "cp": 0, "mine": True},
                {"rank": 1, "node_id": "n_2", "node": "node-2", "dp": 0, "tp": 0, "pp": 1, "cp": 0, "mine": True},
            ],
            "links": [
                {
                    "from": 0,
                    "to": -1,
                    "sent": 10,
                    "received": 20,
                    "sent_rate": 1.0,
                    "received_rate": None,
                    "rtt_ms": 3.25,
                    "rtt_age_s": 20.0,
                    "path": "relay",
                    "line_rate": 1250000.0,
                }
            ],
            "units": 7,
        }
    ]
    assert sections["earnings"] == {
        "confirmed_micro": 4000,
        "confirmed_units": 2,
        "pending_units": 1,
        "today_micro": 1000,
        "confirmed_at": 9.0,
        "price_note": "1 unit = 1000 micro-credits per micro-batch",
    }
    assert sections["events"] == [{"at": 1.0, "severity": "info", "source": "hub", "text": "[00] x"}]


def test_a_dead_worker_has_no_speed_and_no_loss_of_zero() -> None:
    dead = build_sections(RUNNING, 8.0)["workers"][1]
    assert (dead["state"], dead["last_exit"]) == ("exited", "killed by signal 9 (SIGKILL)")
    assert (dead["tokens_per_second"], dead["loss"], dead["pid"], dead["rss"]) == (None, None, None, None)


def test_before_the_topology_only_own_ranks_are_members() -> None:
    (shown,) = build_sections(picture(workers=(worker(S.STARTING, rank=1),), jobs=(job(),)), 0.0)["jobs"]
    assert (shown["state"], shown["step"], shown["loss"], shown["tokens_per_second"]) == ("starting", None, None, None)
    assert [(member["rank"], member["node"], member["pp"]) for member in shown["members"]] == [(1, "atlas-3", 1)]


def test_an_ended_job_says_so_and_does_not_mix_with_another_epoch() -> None:
    pictured = picture(workers=(worker(epoch=2, progress=progress(9)),), jobs=(job(ended="finished"),))
    (shown,) = build_sections(pictured, 0.0)["jobs"]
    assert (shown["state"], shown["step"], shown["members"]) == ("ended", None, [])


def test_hub_error_and_unusable_device_reach_the_screen() -> None:
    sections = build_sections(picture(link=REJECTED, devices=(WEDGED,)), 0.0)
    assert sections["hub"]["state"] == "rejected"
    assert sections["hub"]["error"] == {
        "code": "unreachable",
        "message": "no hub answers",
        "fix": "check the address",
    }
    assert sections["hub"]["rtt_ms"] is None
    (device,) = sections["devices"]
    assert (device["usable"], device["reason"], device["slots"]) == (False, "NVML error 999", 0)


def test_claims_that_the_hub_has_not_answered_are_pending_too() -> None:
    earned = build_sections(picture(unanswered=7), 0.0)["earnings"]
    assert (earned["confirmed_units"], earned["pending_units"]) == (2, 8)


def test_only_what_changed_is_sent_and_whole() -> None:
    before = build_sections(RUNNING, 8.0)
    after = build_sections(replace(RUNNING, today_micro=2000), 8.0)
    assert changed_sections(before, before) == {}
    assert changed_sections(before, after) == {"earnings": after["earnings"]}
    assert changed_sections({}, after) == after


def test_a_device_tells_its_readings_and_whose_its_processes_are() -> None:
    processes = (
        DeviceProcess(pid=7, name="python", type="compute", memory=5, utilization=0.251),
        DeviceProcess(pid=8, name="game", type="graphics", memory=Unavailable(reason="x")),
        DeviceProcess(pid=9, name=Unavailable(reason="x"), type="compute", memory=1),
    )
    gpu = replace(CPU, processes=processes, throttle=("heat",), clock_mhz=2520.4, driver="550.54.14")
    mine = worker(pid=7)
    (device,) = build_sections(picture(devices=(gpu,), workers=(mine,), helper_pids=frozenset({8})), 0.0)["devices"]
    assert device["processes"] == [
        {"pid": 7, "name": "python", "type": "compute", "memory": 5, "utilization": 0.25, "owner": "own"},
        {"pid": 8, "name": "game", "type": "graphics", "memory": None, "utilization": None, "owner": "own"},
        {"pid": 9, "name": None, "type": "compute", "memory": 1, "utilization": None, "owner": "unknown"},
    ]
    assert (device["throttle"], device["clock_mhz"], device["driver"]) == (["heat"], 2520, "550.54.14")
    assert "throttle" not in device["unavailable"]
