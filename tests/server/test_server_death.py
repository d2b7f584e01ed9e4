"""kill -9 of the supervisor: no worker outlives it, whatever the worker does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from server_fakes import Client, alive, wait_until
from server_processes import Child, closing, kill_all, sections, start_with_fake_workers, worker_pids

from distensor_server.orphans import Orphans, WorkerRegistry, end_orphans

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


@pytest.mark.parametrize("options", [(), pytest.param(("--pdeathsig",), marks=LINUX)])
def test_no_worker_is_left_a_second_after_kill_9(short_dir: Path, options: tuple[str, ...]) -> None:
    with closing(start_with_fake_workers(short_dir, *options)) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        assert all(alive(pid) for pid in pids)
        began = time.monotonic()
        supervisor.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), "the workers are gone", 1.0)
        print(f"\nworkers gone {time.monotonic() - began:.3f} s after kill -9 of the supervisor")


def guard_of(supervisor: Child) -> psutil.Process:
    def found() -> psutil.Process | None:
        own = psutil.Process(supervisor.pid).children()
        return next((child for child in own if child.cmdline()[:1] == ["/bin/sh"]), None)

    guard: psutil.Process = wait_until(found, "the guard is there")
    return guard


def children_of(directory: Path) -> list[int]:
    told = [event["text"] for event in sections(directory)["events"]]
    return [int(text.split()[1]) for text in told if text.startswith("child ")]


def test_workers_that_ignore_everything_and_their_children_are_ended_by_the_guard(short_dir: Path) -> None:
    """PRO-01: two workers, each with a child; the supervisor gets SIGKILL."""
    with closing(start_with_fake_workers(short_dir, "--ignore-eof", "--with-child")) as supervisor:
        pids = [*worker_pids(short_dir, "running", 2), *children_of(short_dir)]
        assert len(pids) == 4
        guard = guard_of(supervisor)
        supervisor.kill()
        try:
            wait_until(lambda: not any(alive(pid) for pid in pids), "all descendants are gone", 5.0)
            wait_until(lambda: not alive(guard.pid), "and so is the guard", 5.0)
        finally:
            kill_all(pids)


def test_a_guard_that_was_killed_is_told_and_ends_nobody(short_dir: Path) -> None:
    with closing(start_with_fake_workers(short_dir)) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        guard_of(supervisor).kill()
        wait_until(lambda: any("the guard" in e["text"] for e in sections(short_dir)["events"]), "told")
        assert worker_pids(short_dir, "running", 2) == pids
        assert supervisor.end() == 0


def test_orphans_that_ignore_everything_are_ended_at_the_next_start(short_dir: Path) -> None:
    with closing(start_with_fake_workers(short_dir, "--ignore-eof", "--with-child")) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        children = children_of(short_dir)
        guard = guard_of(supervisor)
        supervisor.process.send_signal(signal.SIGSTOP)  # so that it does not start another one
        guard.kill()
        supervisor.kill()
    try:
        assert all(alive(pid) for pid in (*pids, *children)), "they do ignore the end of input"
        with closing(start_with_fake_workers(short_dir, ranks=())) as again:
            assert not any(alive(pid) for pid in (*pids, *children)), "ended before anything is offered"
            texts = [event["text"] for event in sections(short_dir)["events"]]
            assert "ended 4 workers that a former supervisor left behind" in texts
            assert again.end() == 0
        assert not (short_dir / "state/workers.json").exists()
    finally:
        kill_all([*pids, *children])


def test_a_restart_after_kill_9_works_at_once_on_the_same_socket(short_dir: Path) -> None:
    for _ in range(3):
        with closing(start_with_fake_workers(short_dir)) as supervisor:
            worker_pids(short_dir, "running", 2)
            supervisor.kill()
    with closing(start_with_fake_workers(short_dir)) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        assert supervisor.end() == 0
        assert not any(alive(pid) for pid in pids)


def test_claims_survive_kill_9(short_dir: Path) -> None:
    """The job does 3 steps on each of 2 ranks; every unit is in the receipts although nothing was closed."""
    with closing(start_with_fake_workers(short_dir)) as supervisor:
        wait_until(lambda: (jobs := sections(short_dir)["jobs"]) and jobs[0]["units"] == 6, "6 units", 20)
        supervisor.kill()
    (file,) = (short_dir / "state/receipts").iterdir()
    assert len(file.read_text().splitlines()) == 6


def test_a_process_of_somebody_else_is_never_ended(short_dir: Path) -> None:
    """A process id of a former worker may belong to anything by now."""
    sleeper = Child(["sleep", "600"], short_dir / "log")
    with closing(sleeper):
        registry = WorkerRegistry(short_dir / "workers.json")
        registry.begin()
        registry.add(sleeper.pid)
        text = (short_dir / "workers.json").read_text()
        started = str(psutil.Process(sleeper.pid).create_time())
        assert started in text
        (short_dir / "workers.json").write_text(text.replace(started, str(float(started) - 100)))
        assert end_orphans(short_dir / "workers.json") == Orphans()
        assert alive(sleeper.pid)
        (short_dir / "workers.json").write_text(text)
        assert end_orphans(short_dir / "workers.json") == Orphans(ended=1)
        assert not alive(sleeper.pid) or sleeper.process.wait(5) == -signal.SIGKILL
        assert end_orphans(short_dir / "workers.json") == Orphans()


def test_sigterm_drains_and_the_exit_is_clean(short_dir: Path) -> None:
    with closing(start_with_fake_workers(short_dir)) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        began = time.monotonic()
        assert supervisor.end() == 0
        assert time.monotonic() - began < 5
        assert not any(alive(pid) for pid in pids)
        assert not (short_dir / "s.sock").exists()


def test_a_second_sigterm_does_not_wait(short_dir: Path) -> None:
    with closing(start_with_fake_workers(short_dir, "--ignore-drain")) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        os.kill(supervisor.pid, signal.SIGTERM)
        wait_until(lambda: sections(short_dir)["node"]["state"] == "DRAINING", "draining")
        assert all(alive(pid) for pid in pids)
        assert supervisor.end() == 0
        assert not any(alive(pid) for pid in pids)


def test_a_stopped_and_continued_supervisor_goes_on(short_dir: Path) -> None:
    """PRO-08, in small: suspend is no failure."""
    with closing(start_with_fake_workers(short_dir)) as supervisor:
        pids = worker_pids(short_dir, "running", 2)
        for pid in (supervisor.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        for pid in (supervisor.pid, *pids):
            os.kill(pid, signal.SIGCONT)
        assert worker_pids(short_dir, "running", 2) == pids
        client = Client(short_dir / "s.sock")
        assert client.request("ping")["ok"]
        client.close()
        assert all(worker["restarts"] == 0 for worker in sections(short_dir)["workers"])
