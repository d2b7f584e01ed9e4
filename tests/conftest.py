"""What every test gets: one torch thread, repeatable hypothesis runs, no child process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# Two cores run two test processes: a thread pool in each would only wait for the other. Before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# Nothing is fetched from a model hub, whatever a configuration class would like to look up.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

GRACE_S = 3.0


def pytest_report_header() -> str:
    """Which of the two emulations of slow links this machine permits, so that a log says what was tried."""
    from distensor.testing.homenet import permitted

    permission = permitted()
    return f"emulated network: {permission.reason if permission.granted else f'forwarder only: {permission.reason}'}"


LONGEST_FIRST = ("e2e", "installers", "training", "program", "node", "server")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that the short ones fill up what is left of each test process.

    pytest-xdist would begin with the files that have the most tests; those that start whole systems have few.
    """
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


HELPERS_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _child_pids() -> set[int]:
    """Direct children of this process; from /proc where it lists them, since psutil walks every process."""
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return {child.pid for child in psutil.Process().children()}


def _living(pids: set[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            words = " ".join(process.cmdline())
            helper = any(name in words for name in HELPERS_OF_PYTHON)
            if process.status() != psutil.STATUS_ZOMBIE and not helper:
                found.append(process)
    return found


def _end(processes: Sequence[psutil.Process]) -> list[str]:
    """Kill the processes with all that they started; one line for each."""
    told = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [process, *process.children(recursive=True)]
            told.append(f"pid {process.pid}: {' '.join(process.cmdline())[:200]}")
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            psutil.wait_procs(family, timeout=GRACE_S)
    return told


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """Fail a test that leaves a process of its own running; fixtures of a wider scope may keep theirs."""
    before = _child_pids()
    yield
    deadline = time.monotonic() + GRACE_S
    left = _living(_child_pids() - before)
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.05)
        left = _living(_child_pids() - before)
    if left:
        pytest.fail("the test left processes running:\n  " + "\n  ".join(_end(left)))


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def run_to_end(
    argv: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process group; past the timeout the group is killed and the test fails."""
    words = [str(word) for word in argv]
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=None if env is None else dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(words)} did not end within {timeout} s\nstdout:\n{out}\nstderr:\n{err}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def run() -> Run:
    """`run(argv, timeout=60, cwd=None, env=None, stdin="")` -> CompletedProcess with text."""
    return run_to_end


@pytest.fixture
def python(run: Run) -> Run:
    """`python("-c", code, timeout=60)`: the same with this interpreter in front."""

    def call(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, *words], **options)

    return call
