"""The command as it is installed, against a real hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_fakes import Client, alive, wait_until
from server_processes import Child, closing, sections, start_command, start_hub, start_with_fake_workers

from distensor.comm import HubClient, new_key_and_csr
from distensor.comm.tokens import JoinToken, decode_token
from distensor.core.control import JobSpec, JobState, JobUpdate, Unit, UnitKey, WorkerState
from distensor.core.ids import DRIVER_RANK, JobId, Rank
from distensor.core.parallel import ParallelConfig
from distensor_server import cli

Environment = dict[str, str]


@pytest.fixture
def hub(short_dir: Path) -> Iterator[Child]:
    with closing(start_hub(short_dir)) as child:
        yield child


@pytest.fixture
def ready(hub: Child) -> dict[str, Any]:
    """What the hub said of itself."""
    return hub.line()


def joining(token: str) -> Environment:
    return {"DISTENSOR_JOIN_TOKEN": token}


def changed(token: str, **fields: Any) -> str:
    """The same token with other contents and a right checksum."""
    from dataclasses import replace

    made: JoinToken = replace(decode_token(token), **fields)
    return made.encode()


def test_it_joins_and_is_seen_by_the_hub(short_dir: Path, ready: dict[str, Any]) -> None:
    token = ready["node_tokens"][0]
    with closing(start_command(short_dir, "--cpu-workers", "3", env=joining(token))) as server:
        first, second = server.line(), server.line()
        assert first == {"v": 1, "event": "ready", "socket": str(short_dir / "s.sock"), "pid": server.pid}
        assert (second["event"], second["node_id"][:2]) == ("connected", "n_")
        client = HubClient(ready["trainer_token"])
        (node,) = wait_until(lambda: [n for n in client.query_mesh().nodes if n.connected], "the node is in the mesh")
        client.close()
        assert (node.info.node_id, node.info.name, node.free_slots) == (second["node_id"], "atlas-3", 3)
        assert [device.device_id for device in node.info.devices if device.slots == 3] == ["cpu"]
        shown = sections(short_dir)
        assert (shown["node"]["state"], shown["hub"]["state"]) == ("IDLE", "connected")
        assert shown["hub"]["address"] == ready["address"]
        assert shown["hub"]["rtt_ms"] > 0
        for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
            assert not any(token in word for word in process.cmdline())
        assert server.end() == 0
        secret = decode_token(token).secret
        assert secret not in server.log
        kept = [path for path in (short_dir / "state").rglob("*") if path.is_file()]
        assert not any(secret.encode() in path.read_bytes() for path in kept)
        assert (short_dir / "state/credential.json").stat().st_mode & 0o077 == 0
        assert not (short_dir / "s.sock").exists()


def test_it_keeps_its_identity_without_a_token_and_through_a_hub_restart(short_dir: Path) -> None:
    with closing(start_hub(short_dir)) as hub:
        ready = hub.line()
        with closing(start_command(short_dir, env=joining(ready["node_tokens"][0]))) as server:
            server.line()
            node_id = server.line()["node_id"]
            assert server.end() == 0
        with closing(start_command(short_dir)) as server:
            server.line()
            assert server.line()["node_id"] == node_id
            hub.kill()
            wait_until(lambda: sections(short_dir)["hub"]["state"] == "offline", "offline is seen", 40)
            shown = sections(short_dir)
            assert shown["node"]["state"] == "OFFLINE"
            assert shown["hub"]["error"]["message"]
            assert shown["hub"]["error"]["fix"]
            port = int(ready["address"].rpartition(":")[2])
            with closing(start_hub(short_dir, port=port, tokens=0)) as again:
                again.line()
                wait_until(lambda: sections(short_dir)["hub"]["state"] == "connected", "connected again", 60)
                assert sections(short_dir)["node"]["id"] == node_id
                assert server.end() == 0


def test_a_wrong_token_is_rejected_with_a_fix_and_the_supervisor_stays(short_dir: Path, ready: dict[str, Any]) -> None:
    wrong = changed(ready["node_tokens"][0], secret="A" * 32)
    with closing(start_command(short_dir, env=joining(wrong))) as server:
        server.line()
        shown = wait_until(
            lambda: (data := sections(short_dir))["hub"]["state"] == "rejected" and data, "rejected is shown", 20
        )
        assert shown["node"]["state"] == "WAITING"
        assert shown["hub"]["error"]["code"]
        assert shown["hub"]["error"]["fix"]
        assert "A" * 32 not in json.dumps(shown)
        assert "A" * 32 not in server.log
        assert server.process.poll() is None
        assert server.end() == 0


def test_a_hub_that_is_not_there_is_named(short_dir: Path) -> None:
    with closing(start_hub(short_dir)) as hub:
        ready = hub.line()
        hub.kill()
    with closing(start_command(short_dir, env=joining(ready["node_tokens"][0]))) as server:
        server.line()
        shown = wait_until(
            lambda: (data := sections(short_dir))["hub"]["state"] == "offline" and data, "offline is shown", 20
        )
        assert shown["node"]["state"] == "OFFLINE"
        assert ready["address"] in shown["hub"]["error"]["message"]
        assert shown["hub"]["next_retry_at"] is not None
        assert server.end() == 0


class Job:
    """A trainer's view of one job on fake workers."""

    def __init__(self, trainer_token: str, ranks: int, submission: str = "s") -> None:
        self.client = HubClient(trainer_token)
        _, csr = new_key_and_csr(JobId("j_new"), None, DRIVER_RANK)
        spec = JobSpec(
            submission=submission, name="tiny", parallel=ParallelConfig(pipeline_parallel=ranks), csr_pem=csr
        )
        self.job_id, self.epoch = self.client.submit_job(spec)
        self.updates = self.client.watch_job(self.job_id)
        self.seen: list[JobUpdate] = []

    def until(self, condition: Any, what: str) -> JobUpdate:
        for update in self.updates:
            self.seen.append(update)
            if condition(update):
                return update
        raise AssertionError(f"the updates ended before {what}")


def test_a_job_through_a_real_hub(short_dir: Path, ready: dict[str, Any]) -> None:
    """Placed, running, claimed, credited; a killed worker is reported with its reason; the end releases all."""
    csr = short_dir / "csr.pem"
    csr.write_text(new_key_and_csr(JobId("j_new"), None, Rank(0))[1])
    server = start_with_fake_workers(short_dir, "--csr-file", str(csr), token=ready["node_tokens"][0])
    with closing(server):
        assert server.line()["event"] == "connected"
        job = Job(ready["trainer_token"], 2)
        running = job.until(lambda update: update.state is JobState.RUNNING and update.topology, "running")
        assert running.topology is not None
        assert [(m.rank, m.port) for m in running.topology.members] == [(0, 40000), (1, 40001)]
        shown = wait_until(
            lambda: (data := sections(short_dir))["jobs"] and data["jobs"][0]["units"] == 6 and data, "6 units", 20
        )
        assert shown["node"]["state"] == "EARNING"

        job.client.report_units(
            [
                Unit(key=UnitKey(job_id=job.job_id, epoch=job.epoch, step=step, rank=Rank(rank)), micro_batches=2)
                for step in range(3)
                for rank in range(2)
            ]
        )
        earned = wait_until(
            lambda: (data := sections(short_dir)["earnings"])["confirmed_units"] == 6 and data, "credited", 20
        )
        assert (earned["confirmed_micro"], earned["today_micro"], earned["pending_units"]) == (12000, 12000, 0)

        victim = next(worker["pid"] for worker in shown["workers"] if worker["rank"] == 1)
        os.kill(victim, signal.SIGKILL)
        job.until(lambda update: any(w.rank == 1 and w.restarts == 1 for w in update.workers), "restarted")
        told = [w for update in job.seen for w in update.workers if w.rank == 1 and w.state is WorkerState.EXITED]
        # Who watches gets the newest state, so the moment in between may have passed unseen; the node has it.
        assert {(w.reason, w.restarts) for w in told} <= {("killed by signal 9 (SIGKILL)", 0)}
        worker = next(worker for worker in sections(short_dir)["workers"] if worker["rank"] == 1)
        assert "SIGKILL" in worker["last_exit"]

        pids = [worker["pid"] for worker in sections(short_dir)["workers"]]
        job.client.end_job(job.job_id, JobState.FAILED, "a worker was lost")
        wait_until(lambda: not any(pid and alive(pid) for pid in pids), "the workers are released")
        assert sections(short_dir)["jobs"][0]["state"] == "ended"
        job.client.close()
        assert server.end() == 0


def test_jobs_one_after_another_find_their_slots_free(short_dir: Path, ready: dict[str, Any]) -> None:
    """Also PRO-05 in small: processes are started again and again beside the threads of grpc."""
    csr = short_dir / "csr.pem"
    csr.write_text(new_key_and_csr(JobId("j_new"), None, Rank(0))[1])
    server = start_with_fake_workers(short_dir, "--csr-file", str(csr), token=ready["node_tokens"][0])
    with closing(server):
        assert server.line()["event"] == "connected"
        for number in range(6):
            job = Job(ready["trainer_token"], 2, f"s{number}")
            job.until(lambda update: update.state is JobState.RUNNING and update.topology, "running")
            job.client.end_job(job.job_id, JobState.FINISHED, "done")
            job.client.close()
        wait_until(lambda: sections(short_dir)["node"]["state"] == "IDLE", "idle")
        assert [job["state"] for job in sections(short_dir)["jobs"]] == ["ended"] * 5
        assert server.end() == 0


def test_the_hub_dies_and_comes_back_while_workers_run(short_dir: Path) -> None:
    """Workers stay; claims made meanwhile are credited afterwards."""
    csr = short_dir / "csr.pem"
    csr.write_text(new_key_and_csr(JobId("j_new"), None, Rank(0))[1])
    with closing(start_hub(short_dir)) as hub:
        ready = hub.line()
        server = start_with_fake_workers(short_dir, "--csr-file", str(csr), token=ready["node_tokens"][0])
        with closing(server):
            assert server.line()["event"] == "connected"
            job = Job(ready["trainer_token"], 2)
            job.until(lambda update: update.state is JobState.RUNNING and update.topology, "running")
            pids = wait_until(
                lambda: [w["pid"] for w in sections(short_dir)["workers"] if w["state"] == "running"] or None, "run"
            )
            hub.kill()
            shown = wait_until(
                lambda: (data := sections(short_dir))["node"]["state"] == "DEGRADED" and data, "degraded is shown", 40
            )
            assert shown["hub"]["state"] == "offline"
            port = int(ready["address"].rpartition(":")[2])
            with closing(start_hub(short_dir, port=port, tokens=0)) as again:
                again.line()
                wait_until(lambda: sections(short_dir)["node"]["state"] == "EARNING", "earning again", 60)
                assert all(alive(pid) for pid in pids)
                unit = Unit(key=UnitKey(job_id=job.job_id, epoch=job.epoch, step=0, rank=Rank(0)), micro_batches=2)
                job.client.report_units([unit, unit])
                wait_until(lambda: sections(short_dir)["earnings"]["confirmed_units"] == 1, "credited once", 20)
                job.client.end_job(job.job_id, JobState.FINISHED, "done")
                wait_until(lambda: not any(alive(pid) for pid in pids), "released")
                job.client.close()
                assert server.end() == 0


def test_end_of_standard_input_is_the_end(short_dir: Path, ready: dict[str, Any]) -> None:
    with closing(start_command(short_dir, "--exit-with-stdin", env=joining(ready["node_tokens"][0]))) as server:
        server.line()
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.stdin = None
        assert server.process.wait(10) == 0


def test_hangup_reads_the_file_again(short_dir: Path, ready: dict[str, Any]) -> None:
    config = short_dir / "server.toml"
    config.write_text("cpu_workers = 1\n")
    with closing(start_command(short_dir, "--config", str(config), env=joining(ready["node_tokens"][0]))) as server:
        server.line()
        assert sections(short_dir)["devices"][-1]["slots"] == 1
        config.write_text("cpu_workers = 4\n")
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: sections(short_dir)["devices"][-1]["slots"] == 4, "4 slots")
        assert server.end() == 0


def test_a_second_one_on_the_same_directory_is_told_who_has_it(short_dir: Path, ready: dict[str, Any]) -> None:
    with closing(start_command(short_dir, env=joining(ready["node_tokens"][0]))) as server:
        server.line()
        code, error = run_to_end(
            short_dir, "--socket", str(short_dir / "other.sock"), env=joining(ready["node_tokens"][0])
        )
        assert code == 75
        assert f"in use by another supervisor (process {server.pid})" in error
        assert server.end() == 0


def run_to_end(directory: Path, *options: str, env: Environment | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "distensor_server", "run", "--state", str(directory / "state"), *options]
    clean = {name: value for name, value in os.environ.items() if name != "DISTENSOR_JOIN_TOKEN"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**clean, **(env or {})}
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--fly",), 64, "unrecognized arguments: --fly"),
        (("--cpu-workers", "two"), 64, "invalid int value: 'two'"),
        (("--token-file", "/nowhere/token"), 77, "key file /nowhere/token: No such file"),
        (("--name", "a b"), 78, "--name 'a b': expected"),
        (("--config", "/nowhere/server.toml"), 78, "configuration file /nowhere/server.toml: No such file"),
        (("--cpu-workers", "-1"), 78, "cpu_workers = -1: expected 0 to 1024"),
    ],
)
def test_each_mistake_has_its_exit_code_and_words(
    short_dir: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    env = {} if code == 77 else joining(a_token())
    assert_ends(short_dir, options, code, words, env)


def assert_ends(directory: Path, options: tuple[str, ...], code: int, words: str, env: Environment) -> None:
    got, error = run_to_end(directory, *options, env=env)
    assert (got, words in error) == (code, True), error


def a_token() -> str:
    """One that is well formed and leads nowhere."""
    from distensor.comm.address import parse_address
    from distensor.comm.tokens import Role

    return JoinToken(
        address=parse_address("127.0.0.1:9"), fingerprint="0" * 64, role=Role.NODE, secret="S" * 32
    ).encode()


def test_a_token_that_was_cut_off_is_told_at_once_and_not_repeated(short_dir: Path) -> None:
    cut = a_token()[:-5]
    code, error = run_to_end(short_dir, env=joining(cut))
    assert code == 77
    assert "incomplete or altered" in error
    assert cut not in error


def test_a_socket_path_that_is_too_long_or_taken_is_named(short_dir: Path) -> None:
    assert_ends(
        short_dir, ("--socket", str(short_dir / ("x" * 120))), 73, "the system takes about 100", joining(a_token())
    )
    (short_dir / "file").touch()
    assert_ends(short_dir, ("--socket", str(short_dir / "file")), 73, "is no socket", joining(a_token()))


def test_a_state_directory_that_cannot_be_is_named(short_dir: Path) -> None:
    (short_dir / "state").touch()
    words = f"state directory {short_dir}/state"
    assert_ends(short_dir, ("--socket", str(short_dir / "s.sock")), 73, words, joining(a_token()))


def test_a_bug_of_ours_is_shown_and_has_its_code(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ExceptionGroup("tasks", [RuntimeError("a bug")])

    monkeypatch.setattr(cli, "_supervise", fail)
    monkeypatch.setenv("DISTENSOR_JOIN_TOKEN", a_token())
    assert cli.main(["run", "--state", str(short_dir / "state"), "--socket", str(short_dir / "s.sock")]) == 70
    assert "RuntimeError: a bug" in capsys.readouterr().err
    assert "DISTENSOR_JOIN_TOKEN" not in os.environ


def test_help_and_version() -> None:
    for words in (["--help"], ["run", "--help"], ["--version"]):
        done = subprocess.run(
            [sys.executable, "-m", "distensor_server", *words], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0
        assert "distensor-server" in done.stdout


def test_a_dashboard_that_goes_away_is_no_trouble(short_dir: Path, ready: dict[str, Any]) -> None:
    with closing(start_command(short_dir, env=joining(ready["node_tokens"][0]))) as server:
        server.line()
        for _ in range(20):
            client = Client(short_dir / "s.sock")
            client.send_bytes(b'{"type": "request", "id": "1", "method": "snapshot"}\n' * 50)
            client.close()
        assert sections(short_dir)["node"]["name"] == "atlas-3"
        assert server.end() == 0
        assert "Traceback" not in server.log
