"""The Makefile, the generated stubs, and what conftest promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import repo_rules as rules

Run = Callable[..., "subprocess.CompletedProcess[str]"]
JOBS = ["help", "dev", "demo", "test", "check", "lint", "format", "types", "layers"]
JOBS += ["wheels", "proto", "parity", "bench", "bench-provider", "bench-distro", "bench-hub", "gallery"]
JOBS += ["cloud-up", "cloud-down", "cloud-hub", "cloud-api", "sandbox-up", "soak", "clean"]


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """Without what an outer `make` hands down."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def test_make_alone_lists_every_job(run: Run, clean_environment: dict[str, str]) -> None:
    done = run(["make", "-C", rules.ROOT, "--no-print-directory"], env=clean_environment)
    assert re.findall(r"^  make ([\w-]+)", done.stdout, re.MULTILINE) == JOBS
    assert done.returncode == 0


def test_wheels_are_built_without_what_training_needs(
    run: Run, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """Who lends a machine builds them once: PyTorch for that would be minutes and 1.4 GB."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((rules.ROOT / name).read_text())
    done = run(["make", "-n", "-C", tmp_path, "wheels"], env=clean_environment)
    assert done.returncode == 0, done.stderr
    assert "pip install --quiet --disable-pip-version-check -c constraints.txt build\n" in done.stdout
    assert "worker" not in done.stdout


@pytest.mark.parametrize("body", ['echo "Python 3.10.4"; exit 1', "exit 127"])
def test_too_old_or_no_python_is_said_plainly(
    run: Run, tmp_path: Path, clean_environment: dict[str, str], body: str
) -> None:
    fake = tmp_path / "python3.10"
    fake.write_text(f"#!/bin/sh\n{body}\n")
    fake.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((rules.ROOT / name).read_text())
    done = run(["make", "-C", tmp_path, "dev", f"PYTHON={fake}"], env=clean_environment)
    assert done.returncode == 2
    assert "needs Python 3.11 or newer" in done.stderr
    assert str(fake) in done.stderr
    assert "make dev PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_the_jobs_of_the_makefile() -> None:
    called = re.findall(r"^make (\w+)$", (rules.ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(called) == {"dev", "lint", "types", "layers", "wheels", "test"}


def test_the_stubs_are_those_of_the_protocol(python: Run, tmp_path: Path) -> None:
    core = rules.ROOT / "core"
    flags = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy")]
    flags.append(f"--plugin=protoc-gen-mypy={Path(sys.executable).with_name('protoc-gen-mypy')}")
    done = python("-m", "grpc_tools.protoc", f"-I{core}", *flags, "distensor/proto/control.proto", cwd=core)
    assert done.returncode == 0, done.stderr
    made = sorted((tmp_path / "distensor/proto").iterdir())
    assert {path.name for path in made} == {"control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"}
    stale = [path.name for path in made if path.read_text() != (core / "distensor/proto" / path.name).read_text()]
    assert stale == [], "run `make proto`"


LEAVES_A_CHILD = """
import subprocess, sys
def test_leaves_a_child():
    subprocess.Popen([sys.executable, "-c", "import time; print(1); time.sleep(60)"])
def test_tidy():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


def test_a_test_that_leaves_a_child_fails_and_the_child_is_ended(python: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((rules.ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_inner.py").write_text(LEAVES_A_CHILD)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", cwd=tmp_path)
    assert "the test left processes running:" in done.stdout
    assert "2 passed, 1 error" in done.stdout
    pid = int(re.findall(r"pid (\d+):", done.stdout)[0])
    assert not psutil.pid_exists(pid)


def test_a_command_that_hangs_is_killed_with_all_it_started(run: Run) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with pytest.raises(pytest.fail.Exception, match="did not end within"):
        run([sys.executable, "-c", code], timeout=0.5)
