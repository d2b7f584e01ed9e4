"""What the owner and the dashboard ask of the supervisor, what it keeps, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from pathlib import Path

import psutil
import pytest
from server_fakes import (
    AsyncClient,
    Running,
    ShiftedClock,
    alive,
    events,
    eventually,
    own_worker,
    start_job,
    state_of,
    supervisor_running,
)

from distensor.comm import LinkState
from distensor.core.control import Earnings, WorkerState
from distensor.core.errors import SessionError, StoreError
from distensor.core.ids import Epoch, JobId
from distensor_server.supervisor import StopMode

S = WorkerState
pytestmark = pytest.mark.asyncio
JOB = (JobId("j_1"), Epoch(1))


async def test_pause_and_resume(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        client = await AsyncClient.connect(short_dir / "s.sock")
        answer = await client.request("pause", seconds=3600)
        assert answer["ok"]
        assert abs(answer["result"]["until"] - time.time() - 3600) < 5
        assert not running.link.accepting
        await running.reported(S.EXITED)
        assert running.link.changes()[-1].reason == "paused by the owner"
        assert state_of(running) == "PAUSED"
        running.assign(1)
        assert running.link.changes(1)[0].reason == "refused: the owner asked for pause"
        assert (await client.request("resume"))["ok"]
        assert running.link.accepting
        assert state_of(running) == "IDLE"
        assert not (await client.request("resume", now=True))["ok"]
        assert not (await client.request("pause", seconds=-1))["ok"]
        await client.close()


async def test_drain_gives_running_work_its_time(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--ignore-drain") as running:
        await start_job(running, 0)
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("drain", seconds=1))["result"] == {"seconds": 1.0}
        assert state_of(running) == "DRAINING"
        await running.reported(S.EXITED)
        assert state_of(running) == "PAUSED"
        await client.close()


async def test_a_pause_outlives_the_supervisor_and_ends_at_its_time(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause")
        await client.close()
    async with supervisor_running(short_dir) as running:
        assert not running.link.accepting
        assert state_of(running) == "PAUSED"
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("pause", seconds=0.5)
        await client.close()
        await eventually(lambda: running.link.accepting, "the pause is over")
        assert state_of(running) == "IDLE"


async def test_deltas_reach_a_dashboard(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        hello, snapshot = await client.read(), await client.read()
        assert hello is not None
        assert hello["node"] == "atlas-3"
        assert snapshot is not None
        assert snapshot["data"]["node"]["state"] == "IDLE"
        await start_job(running, 0)
        began, seen, deltas = time.monotonic(), dict(snapshot["data"]), 0
        while seen["node"]["state"] != "EARNING" or seen["jobs"][0]["units"] != 3:
            message = await client.read()
            assert message is not None
            deltas += 1
            assert message["seq"] == deltas + 1
            seen |= message["data"]
        assert deltas <= 4 * (time.monotonic() - began) + 2
        assert seen["workers"][0]["step"] == 2
        await client.close()


async def test_earnings_are_shown_and_kept(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        running.link.handler.on_earnings(Earnings(confirmed_micro=5000, confirmed_units=3, pending_units=1))
        shown = running.sections()["earnings"]
        assert (shown["confirmed_micro"], shown["today_micro"], shown["pending_units"]) == (5000, 5000, 1)
        assert abs(shown["confirmed_at"] - time.time()) < 5
    async with supervisor_running(short_dir) as running:
        shown = running.sections()["earnings"]
        assert (shown["confirmed_micro"], shown["today_micro"], shown["confirmed_at"]) == (5000, 5000, None)
        running.link.handler.on_earnings(Earnings(confirmed_micro=7000))
        assert running.sections()["earnings"]["today_micro"] == 7000


async def test_recent_claims_are_made_again_after_a_start(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        claims = await eventually(lambda: len(running.link.claims) == 3 and running.link.claims, "claimed")
    async with supervisor_running(short_dir) as again:
        assert again.link.claims == claims


async def test_a_full_disk_is_shown_and_work_goes_on(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        (short_dir / "state/receipts").rename(short_dir / "state/gone")
        await start_job(running, 0)
        await eventually(lambda: len(running.link.claims) == 3, "claimed all the same")
        assert any("cannot write receipts" in text for text in events(running))
        (short_dir / "state/gone").rename(short_dir / "state/receipts")


@pytest.mark.parametrize(("with_worker", "state"), [(False, "OFFLINE"), (True, "DEGRADED")])
async def test_without_a_hub_the_work_goes_on_and_the_reason_is_shown(
    short_dir: Path, with_worker: bool, state: str
) -> None:
    async with supervisor_running(short_dir) as running:
        if with_worker:
            await start_job(running, 0)
        running.link.reject()
        sections = running.sections()
        assert sections["node"]["state"] == state
        assert sections["hub"]["state"] == "rejected"
        assert sections["hub"]["error"] == {
            "code": "token_used",
            "message": "the join token was used already",
            "fix": "make another",
        }
        assert sections["hub"]["next_retry_at"] > time.time()
        assert any("the join token was used already; make another" in text for text in events(running))
        assert not with_worker or own_worker(running)["state"] == "running"


async def test_draining_waits_and_a_second_stop_does_not(short_dir: Path) -> None:
    async with supervisor_running(short_dir, "--ignore-drain") as running:
        await start_job(running, 0)
        pid = own_worker(running)["pid"]
        running.supervisor.stop_by_signal("SIGTERM")
        await running.reported(S.DRAINING)
        assert state_of(running) == "DRAINING"
        assert alive(pid)
        running.supervisor.stop_by_signal("SIGTERM")
        await asyncio.wait_for(running.task, 10)
        assert not alive(pid)
        assert not (short_dir / "s.sock").exists()
        assert not (short_dir / "state/workers.json").exists()


async def test_a_drain_ends_as_soon_as_the_workers_do(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0, 1)
        running.supervisor.stop_by_signal("SIGTERM")
        await asyncio.wait_for(running.task, 10)
        assert running.link.changes()[-1].reason == "the supervisor got SIGTERM"
        assert not running.link.accepting


async def test_a_failure_inside_ends_everything_in_order(short_dir: Path) -> None:
    async with supervisor_running(short_dir, may_fail=True) as running:
        await start_job(running, 0)
        pid = own_worker(running)["pid"]
        running.link.failure.set_result(RuntimeError("a bug"))
        await asyncio.wait({running.task}, timeout=10)
    error = running.task.exception()
    assert isinstance(error, ExceptionGroup)
    assert "a bug" in str(error.exceptions)
    assert not alive(pid)
    assert not (short_dir / "s.sock").exists()


async def test_a_second_supervisor_is_refused_and_harms_nothing(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        with pytest.raises(SessionError, match=r"state directory .* is in use by another supervisor \(process \d+\)"):
            async with supervisor_running(short_dir, connect=False) as second:
                await asyncio.wait({second.task}, timeout=10)
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("ping"))["ok"]
        await client.close()
        assert state_of(running) == "IDLE"


async def test_a_socket_that_cannot_be_made_ends_the_start(short_dir: Path) -> None:
    (short_dir / "s.sock").write_text("precious")
    with pytest.raises(StoreError, match="is no socket"):
        async with supervisor_running(short_dir, connect=False) as running:
            await asyncio.wait({running.task}, timeout=10)


async def test_limits_are_read_again_and_a_bad_file_changes_nothing(short_dir: Path) -> None:
    config = short_dir / "server.toml"
    config.write_text("cpu_workers = 1\n")
    async with supervisor_running(short_dir, config_file=config, overrides=None) as running:
        assert running.sections()["devices"][-1]["slots"] == 1
        config.write_text("cpu_workers = 3\n")
        running.supervisor.reload()
        assert running.link.describe().devices[-1].slots == 3
        config.write_text("cpu_workerz = 9\n")
        running.supervisor.reload()
        assert running.sections()["devices"][-1]["slots"] == 3
        assert any("unknown key 'cpu_workerz'" in text for text in events(running))


async def test_many_short_jobs_leave_no_zombie_no_descriptor_and_no_thread(short_dir: Path) -> None:
    me = psutil.Process()

    async def one(running: Running, number: int) -> None:
        running.assign(0, 1, job=f"j_{number}")
        await eventually(lambda: [w["state"] for w in running.sections()["workers"][-2:]] == ["ready"] * 2, "ready")
        running.link.handler.on_release(JobId(f"j_{number}"), Epoch(1), "finished")
        await asyncio.wait_for(running.supervisor.node.workforce.all_gone(), 10)

    async with supervisor_running(short_dir) as running:
        for number in range(3):
            await one(running, number)
        before = me.num_fds(), me.num_threads()
        for number in range(3, 50):
            await one(running, number)
        assert not [child for child in me.children() if child.status() == psutil.STATUS_ZOMBIE]
        assert me.num_fds() <= before[0] + 1
        assert me.num_threads() <= before[1] + 1


async def test_offline_from_the_start_is_not_connected(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        running.link.show(LinkState.OFFLINE, next_retry_at=time.time() + 5)
        assert running.sections()["node"]["state"] == "OFFLINE"
        assert running.sections()["hub"]["next_retry_at"] > time.time()
        assert StopMode.NOW > StopMode.DRAIN


async def test_systemd_hears_of_the_whole_life(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.setblocking(False)
        told: list[bytes] = []

        def hear() -> list[bytes]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    told.append(manager.recv(1000))
            return told

        systemd = {"NOTIFY_SOCKET": str(short_dir / "notify"), "WATCHDOG_USEC": "200000"}
        async with supervisor_running(short_dir, environment=systemd) as running:
            await eventually(lambda: hear().count(b"WATCHDOG=1") >= 3, "the watchdog is fed")
            await eventually(lambda: any(m.startswith(b"STATUS=IDLE: workers 0") for m in hear()), "the state is told")
            await start_job(running, 0)
            await eventually(
                lambda: any(m.startswith(b"STATUS=EARNING: workers 1") for m in hear()), "the state is told"
            )
            running.supervisor.reload()
        hear()
    assert told[0] == b"READY=1"
    earning = next(index for index, message in enumerate(told) if message.startswith(b"STATUS=EARNING"))
    (stopping,) = [index for index, message in enumerate(told) if message.startswith(b"STOPPING=1")]
    assert stopping > earning
    assert told[stopping] == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=12500000", "two graces of half a second, and some"
    (reloading,) = [index for index, message in enumerate(told) if message.startswith(b"RELOADING=1\nMONOTONIC_USEC=")]
    assert abs(int(told[reloading].rpartition(b"=")[2]) / 1e6 - time.monotonic()) < 60
    assert b"READY=1" in told[reloading:]


async def test_a_loop_that_is_stuck_is_not_alive_for_systemd(short_dir: Path) -> None:
    clock = ShiftedClock()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.setblocking(False)

        def pings() -> int:
            count = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    count += manager.recv(1000) == b"WATCHDOG=1"
            return count

        systemd = {"NOTIFY_SOCKET": str(short_dir / "notify"), "WATCHDOG_USEC": "100000"}
        async with supervisor_running(short_dir, environment=systemd, clock=clock) as running:
            await eventually(pings, "the watchdog is fed")
            time.sleep(0.5)  # noqa: ASYNC251 - blocks the loop, as a bug would
            assert pings() <= 1
            await eventually(pings, "and fed again")
            clock.monotonic_by += 11  # so long since the last tick
            pings()
            await asyncio.sleep(0.3)
            assert pings() <= 1
            running.supervisor.tick()
            await eventually(pings, "and fed again")


async def test_the_last_snapshot_stays_for_who_looks_later(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        running.supervisor.tick()
        path = short_dir / "state/snapshot.json"
        first = json.loads(path.read_bytes())
        assert path.stat().st_mode & 0o777 == 0o600
        assert first["data"].keys() == running.sections().keys()
        await start_job(running, 0)
        running.supervisor.tick()
        assert json.loads(path.read_bytes()) == first, "not so soon again"
    last = json.loads(path.read_bytes())
    assert (last["v"], last["schema_version"]) == (1, 1)
    assert abs(last["at"] - time.time()) < 10
    assert last["data"]["workers"][0]["last_exit"] == "the test is over"


async def test_a_node_that_others_cannot_reach_is_told_so(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        assert any("peers on other machines cannot reach workers at 127.0.0.1" in text for text in events(running))


async def test_a_release_that_comes_twice_is_told_once(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        await start_job(running, 0)
        for reason in ("finished", "the job is finished"):
            running.link.handler.on_release(JobId("j_1"), Epoch(1), reason)
        assert [text for text in events(running) if "released" in text] == ["job j_1 (epoch 1) released: finished"]
