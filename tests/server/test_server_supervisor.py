"""The whole supervisor in this process: real worker processes that need no torch, a hub that the test speaks for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_fakes import (
    QUICK,
    AsyncClient,
    OneGpu,
    alive,
    assignment,
    certificate,
    events,
    eventually,
    own_worker,
    start_job,
    state_of,
    supervisor_running,
    topology,
)

from distensor.core.control import Unit, UnitKey, WorkerReady, WorkerState
from distensor.core.ids import Epoch, JobId, Rank
from distensor_server.environment import MARK_VARIABLE
from distensor_server.lifecycle import RestartPolicy

S = WorkerState
pytestmark = pytest.mark.asyncio
JOB = (JobId("j_1"), Epoch(1))


async def test_a_job_from_assignment_to_release(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        assert running.announced[0] == {
            "event": "ready",
            "socket": str(short_dir / "s.sock"),
            "pid": os.getpid(),
        }
        assert running.announced[1] == {"event": "connected", "node_id": "n_1"}
        assert state_of(running) == "IDLE"
        info = running.link.describe()
        assert [(device.device_id, device.slots) for device in info.devices] == [("cuda", 0), ("cpu", 2)]

        await start_job(running, 0, 1)
        ready = [r for r in running.link.reports if isinstance(r, WorkerReady)]
        assert sorted((r.rank, r.port, r.csr_pem) for r in ready) == [
            (0, 40000, "csr of rank 0"),
            (1, 40001, "csr of rank 1"),
        ]
        assert sorted(running.link.running()) == [(*JOB, 0), (*JOB, 1)]
        await eventually(lambda: len(running.link.claims) == 6, "all steps are claimed")
        key = UnitKey(job_id=JOB[0], epoch=JOB[1], step=0, rank=Rank(0))
        assert Unit(key=key, micro_batches=2) in running.link.claims
        assert state_of(running) == "EARNING"
        (job,) = running.sections()["jobs"]
        assert (job["state"], job["step"], job["total_steps"], job["units"]) == ("running", 2, 100, 6)
        assert [member["mine"] for member in job["members"]] == [True, True]
        assert {(link["from"], link["to"], link["sent"]) for link in job["links"]} == {(0, -1, 3000), (1, -1, 3000)}

        pids = [own_worker(running, rank)["pid"] for rank in (0, 1)]
        running.link.handler.on_release(*JOB, "finished")
        await running.reported(S.EXITED, rank=0)
        await running.reported(S.EXITED, rank=1)
        assert running.link.changes()[-1].reason == "released: finished"
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert running.link.running() == []
        assert state_of(running) == "IDLE"
        assert running.sections()["jobs"][0]["state"] == "ended"
        assert (short_dir / "state/logs/w_j_1_1_0.log").read_text() == "rank 0 begins\n"


async def test_a_killed_worker_is_named_restarted_and_ready_again(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        os.kill(own_worker(running)["pid"], signal.SIGKILL)
        await running.reported(S.READY, restarts=1)
        told = [(c.state.value, c.restarts, c.reason) for c in running.link.changes()[3:]]
        words = "killed by signal 9 (SIGKILL)"
        assert told == [
            ("exited", 0, words),
            ("backoff", 0, words),
            ("starting", 1, words),
            ("ready", 1, words),
        ]
        worker = own_worker(running)
        assert (worker["restarts"], worker["last_exit"], worker["state"]) == (1, words, "ready")
        assert state_of(running) == "DEGRADED"
        assert running.link.running() == [(*JOB, 0)]
        assert any(words in text and "restart 1 in" in text for text in events(running))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--exit-when-ready", "65", "--failed", "refused_program"), "refused the program: told by the fake (exit 65)"),
        (("--exit-when-ready", "64"), "did not understand its assignment (exit 64)"),
        (("--exit-when-ready", "77"), "handshake refused (exit 77)"),
        (("--exit-when-ready", "0"), "ended by itself (exit 0)"),
    ],
)
async def test_a_final_exit_is_not_restarted(short_dir: Path, options: tuple[str, ...], reason: str) -> None:
    async with supervisor_running(short_dir, *options) as running:
        running.assign(0)
        await running.reported(S.EXITED)
        assert running.link.changes()[-1].reason == reason
        assert running.link.running() == []
        assert own_worker(running)["state"] == "exited"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--exit-when-ready", "1", "--traceback"), "error: ValueError: a bad value (exit 1)"),
        (("--exit-when-ready", "137"), "out of memory (exit 137)"),
        (("--exit-when-ready", "70", "--failed", "out_of_memory"), "out of memory: told by the fake (exit 70)"),
        (("--exit-when-ready", "69", "--failed", "peer_lost"), "lost a peer: told by the fake (exit 69)"),
        (("--signal-when-ready", "11"), "killed by signal 11 (SIGSEGV)"),
    ],
)
async def test_a_crash_loop_is_broken_shown_and_can_be_reset(
    short_dir: Path, options: tuple[str, ...], reason: str
) -> None:
    async with supervisor_running(short_dir, *options) as running:
        running.assign(0)
        await running.reported(S.BROKEN, restarts=2)
        assert {change.reason for change in running.link.changes() if change.state is S.EXITED} == {reason}
        assert own_worker(running)["last_exit"] == reason
        assert state_of(running) == "DEGRADED"
        (fault,) = running.supervisor.node.sections()["faults"]
        assert (fault["code"], fault["subject"]) == ("crash_loop", "w_j_1_1_0")
        assert fault["cause"].endswith(f": {reason}, 3 times in a row")
        assert ("more memory" in fault["fix"]) == reason.startswith("out of memory")
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("reset_breaker", worker="other"))["result"] == {"reset": []}
        assert (await client.request("reset_breaker"))["result"] == {"reset": ["w_j_1_1_0"]}
        assert not (await client.request("reset_breaker", worker=5))["ok"]
        await client.close()
        await running.reported(S.STARTING, restarts=3)


async def test_a_program_that_does_not_exist_is_an_exit_reason(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        from dataclasses import replace

        setup = running.supervisor.node.workforce._setup
        running.supervisor.node.workforce._setup = replace(setup, command=("/nowhere/python",))
        running.assign(0)
        await running.reported(S.BROKEN, restarts=2)
        assert "could not be started" in running.link.changes()[-1].reason
        assert "/nowhere/python" in running.link.changes()[-1].reason


async def test_a_worker_that_is_never_ready_is_killed(short_dir: Path) -> None:
    policy = RestartPolicy(ready_within=0.5, failures_to_break=1)
    async with supervisor_running(short_dir, "--never-ready", policy=policy) as running:
        running.assign(0)
        await running.reported(S.BROKEN)
        assert running.link.changes()[-1].reason == "was not ready within 0.5 s; killed by signal 9 (SIGKILL)"


async def test_a_worker_that_lives_and_finishes_no_step_is_ended_with_that_reason(short_dir: Path) -> None:
    limits = {"cpu_workers": 2, "step_limit_seconds": 0.3}
    async with supervisor_running(short_dir, "--steps", "0", overrides=limits) as running:
        await start_job(running, 0)
        await running.reported(S.BACKOFF)
        assert running.link.changes()[-1].reason == "finished no step within 0.3 s; killed by signal 9 (SIGKILL)"
        assert own_worker(running)["failures"] == 1


async def test_a_broken_worker_stays_broken_when_the_supervisor_comes_back(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--exit-when-ready", "1") as running:
        running.assign(0)
        await running.reported(S.BROKEN, restarts=2)
        running.supervisor.tick()
    async with supervisor_running(short_dir) as again:
        again.assign(0, 1)
        await again.reported(S.READY, rank=1)
        told = [(c.state, c.restarts, c.reason) for c in again.link.changes(0)]
        assert told == [(S.BROKEN, 2, "error: rank 0 begins (exit 1)")]
        assert (own_worker(again)["state"], own_worker(again)["failures"]) == ("broken", 3)
        assert again.supervisor.node.workforce.reset_breakers(None) == ["w_j_1_1_0"]
        await again.reported(S.READY, restarts=3)


async def test_garbage_on_stdout_is_told_once_and_costs_nothing(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--garbage", "50", "--long-line", "2000000") as running:
        await start_job(running, 0)
        told = [text for text in events(running) if "not the protocol" in text]
        assert told == [
            "wrote a line that is not the protocol: Expecting value: line 1 column 1 (char 0) ('garbage 0  [31m')"
        ]


async def test_a_process_that_only_writes_garbage_is_ended(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--garbage", "5000", "--never-ready") as running:
        running.assign(0)
        await running.reported(S.BACKOFF)
        assert "wrote 100 lines that are not the protocol; killed by signal 9" in running.link.changes()[-1].reason


async def test_what_a_worker_started_ends_with_it(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--with-child") as running:
        await start_job(running, 0)
        child = int(next(text for text in events(running) if text.startswith("child ")).split()[1])
        assert psutil.pid_exists(child)
        os.kill(own_worker(running)["pid"], signal.SIGKILL)
        await running.reported(S.EXITED)
        await eventually(lambda: not alive(child), "the worker's child is gone")


async def test_a_worker_that_ignores_the_end_of_input_is_killed_after_the_grace(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--ignore-eof") as running:
        await start_job(running, 0)
        began = time.monotonic()
        running.link.handler.on_release(*JOB, "finished")
        await running.reported(S.EXITED)
        assert QUICK.stop_grace <= time.monotonic() - began < 5
        assert "did not end in time" in running.link.changes()[-1].reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda"}, "device cuda cannot be used: NVML error 12"),
        ({"device": "GPU-9"}, "this node has no device 'GPU-9'"),
        ({"job": "j_2"}, "device cpu has 2 slots and none is free"),
    ],
)
async def test_an_assignment_that_cannot_be_taken_is_refused_with_its_reason(
    short_dir: Path, change: dict[str, Any], words: str
) -> None:
    async with supervisor_running(short_dir) as running:
        running.assign(0, 1)
        running.link.handler.on_assignment(assignment(7, **change))
        (refusal,) = running.link.changes(7)
        assert refusal.state is S.EXITED
        assert refusal.reason.startswith("refused: ")
        assert words in refusal.reason


async def test_the_same_assignment_again_changes_nothing(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        pid = own_worker(running)["pid"]
        running.assign(0)
        assert own_worker(running)["pid"] == pid
        assert len(running.sections()["workers"]) == 1


async def test_a_newer_epoch_takes_the_place_and_an_older_one_is_refused(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0, 1)
        old = own_worker(running)["pid"]
        running.assign(0, epoch=2)
        await eventually(
            lambda: any(w["epoch"] == 2 and w["state"] == "ready" for w in running.sections()["workers"]), "new"
        )
        assert not alive(old), "the device's memory belongs to one of them only"
        running.assign(3, epoch=1)
        assert "epoch 1 of job j_1 is over" in running.link.changes(3)[0].reason
        running.link.handler.on_topology(topology(epoch=1), [certificate(0)])
        assert running.link.running() == [(JOB[0], 2, 0)]


async def test_a_release_before_the_process_is_there_prevents_it(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        running.assign(0)
        running.link.handler.on_release(*JOB, "cancelled")
        await running.reported(S.EXITED)
        await asyncio.wait_for(running.supervisor.node.workforce.all_gone(), 5)
        assert own_worker(running)["pid"] is None


async def test_unknown_jobs_are_no_trouble(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        running.link.handler.on_release(JobId("j_9"), Epoch(1), "whatever")
        running.link.handler.on_topology(topology(job="j_9"), [certificate(0)])
        assert running.sections()["jobs"] == []


async def test_only_the_last_ended_jobs_are_kept(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        for number in range(8):
            running.assign(0, job=f"j_{number}", ranks=1)
            await eventually(
                lambda number=number: any(
                    w["job"] == f"j_{number}" and w["state"] == "ready" for w in running.sections()["workers"]
                ),
                "ready",
            )
            running.link.handler.on_release(JobId(f"j_{number}"), Epoch(1), "finished")
            await asyncio.wait_for(running.supervisor.node.workforce.all_gone(), 10)
        names = [job["id"] for job in running.sections()["jobs"]]
        assert names == [f"j_{number}" for number in range(3, 8)]
        assert len(running.sections()["workers"]) == 5


async def test_the_environment_of_a_worker_holds_no_secret(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTENSOR_JOIN_TOKEN", "dtj_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret")
    told = short_dir / "environment.json"
    async with supervisor_running(short_dir, "--tell-environment", str(told)) as running:
        running.assign(0)
        await running.reported(S.READY)
        seen = json.loads(told.read_text())
        assert "secret" not in json.dumps(seen)
        assert len(seen["environment"][MARK_VARIABLE]) == 32
        assert int(seen["environment"]["OMP_NUM_THREADS"]) >= 1
        process = psutil.Process(own_worker(running)["pid"])
        assert os.getsid(process.pid) == process.pid, "a session of its own"


async def test_a_worker_sees_its_own_gpu_only_and_by_uuid(short_dir: Path) -> None:
    told = short_dir / "environment.json"
    options = ("--tell-environment", str(told))
    async with supervisor_running(short_dir, *options, detector=OneGpu()) as running:
        running.assign(0, device="GPU-7")
        await running.reported(S.READY)
        assert json.loads(told.read_text())["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-7"
        assert running.sections()["devices"][0]["workers"] == ["w_j_1_1_0"]
        running.assign(1, device="GPU-7")
        assert "device GPU-7 has 1 slots and none is free" in running.link.changes(1)[0].reason


async def test_a_worker_on_the_cpu_is_told_its_share(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        device = running.supervisor.node.inventory.devices[-1]
        memory, threads = running.supervisor.node.inventory.share(device)
        assert isinstance(device.memory_total, int)
        assert memory is not None
        assert memory * 2 <= device.memory_total
        assert threads >= 1


async def test_repeated_and_late_lines_of_a_worker_change_nothing(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        worker = running.supervisor.node.workforce.workers[0]
        before = list(running.link.reports)
        worker._on_line(b'{"type": "ready", "v": 1, "port": 5, "csr": "again"}')
        worker._on_line(b'{"type": "connected"}')
        assert running.link.reports == before
        running.link.handler.on_release(*JOB, "finished")
        worker._on_line(b'{"type": "connected"}')
        await running.reported(S.EXITED)
        assert [state for state, _ in running.link.states()][-2:] == [S.DRAINING, S.EXITED]


async def test_a_process_goes_on_in_the_next_epoch_and_one_that_does_not_is_released(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0, 1)
        await eventually(lambda: len(running.link.claims) == 6, "all steps are claimed")
        staying, leaving = (own_worker(running, rank)["pid"] for rank in (1, 0))
        running.link.handler.on_assignment(replace(assignment(0, epoch=2, ranks=1), continues=Rank(1)))
        running.link.handler.on_release(JobId("j_1"), Epoch(1), "superseded by epoch 2")
        await eventually(lambda: any(is_of(report, 2, 0) for report in running.link.reports), "it is ready again")
        await eventually(lambda: not psutil.pid_exists(leaving), "the other one is gone")
        assert running.link.running() == [(JobId("j_1"), Epoch(2), 0)]
        mine = next(worker for worker in running.sections()["workers"] if worker["pid"] == staying)
        assert (mine["rank"], mine["state"], mine["restarts"]) == (0, "ready", 0)
        running.link.handler.on_topology(topology(epoch=2, ranks=1), [certificate(0)])
        await eventually(lambda: len(running.link.claims) == 9, "it works on")
        job = next(job for job in running.sections()["jobs"] if job["state"] != "ended")
        assert job["units"] == 9, "what this node did for the job, in whichever epoch"


async def test_where_the_process_is_gone_a_new_one_takes_the_place(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        before = own_worker(running)["pid"]
        running.link.handler.on_assignment(replace(assignment(0, epoch=2, ranks=2), continues=Rank(1)))
        await eventually(lambda: any(is_of(report, 2, 0) for report in running.link.reports), "a new one is ready")
        assert not psutil.pid_exists(before), "the one of the older epoch made room"


def is_of(report: object, epoch: int, rank: int) -> bool:
    return isinstance(report, WorkerReady) and (report.epoch, report.rank) == (epoch, rank)
