"""The whole way of a provider on Linux: install, key, service, a job, an update, earnings kept, and away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from installer_kit import Box, write_sums

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/server"))

from server_fakes import wait_until  # noqa: E402 - the kit of the server's tests
from server_processes import closing, start_hub  # noqa: E402

pytestmark = pytest.mark.timeout(180)


def status(box: Box) -> dict[str, Any]:
    done = box.distensor("status", "--json")
    answer: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return answer


def train_on(token: str) -> None:
    """The README's quick start on the one worker there is, as a process of its own: 80 steps."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/quickstart.py")],
        env={**os.environ, "DISTENSOR_TOKEN": token, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "free workers: 1, used: 1" in done.stdout


def test_install_key_job_update_uninstall(box: Box, tmp_path: Path) -> None:
    box.with_systemd()
    before = box.tree()
    with closing(start_hub(tmp_path)) as hub:
        ready = hub.line()
        done = box.run("linux.sh", env={"DISTENSOR_API_KEY": ready["node_tokens"][0]})
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is installed and its supervisor answers" in done.stdout
        unit = (box.home / ".config/systemd/user/distensor.service").read_text()
        assert ready["node_tokens"][0] not in unit + done.stdout + done.stderr
        assert f'{box.home}/.local/share/distensor/current/bin/distensor-server"' in unit.replace("\\x20", " ")
        wait_until(lambda: status(box).get("hub", {}).get("state") == "connected", "the node is at the hub", 30)
        node = status(box)["node"]["id"]

        assert box.distensor("limits", "set", "drain_seconds", "7").returncode == 0
        train_on(ready["trainer_token"])
        wait_until(lambda: _confirmed(box) == 80, "all steps are credited", 30)

        running = (box.systemd / "pid").read_text()
        again = box.run("linux.sh")
        assert again.returncode == 0, again.stderr
        assert "it runs already" in again.stdout
        assert (box.systemd / "pid").read_text() == running  # the same wheels end nobody's work

        newer = box.folder / "newer"
        shutil.copytree(box.wheels, newer)
        write_sums(newer, comment="0  another-build")
        updated = box.run("linux.sh", env={"DISTENSOR_WHEELS": str(newer)})
        assert updated.returncode == 0, updated.stdout + updated.stderr
        assert "running work has up to two minutes" in updated.stdout
        assert (box.systemd / "pid").read_text() != running
        wait_until(lambda: status(box).get("hub", {}).get("state") == "connected", "the node is back", 30)
        assert status(box)["node"]["id"] == node
        assert _confirmed(box) == 80
        assert "7" in box.distensor("limits", "get", "drain_seconds").stdout

        assert json.loads(box.distensor("service", "status", "--json").stdout)["state"] == "running"
        pid = int((box.systemd / "pid").read_text())
        gone = box.distensor("uninstall", "--purge")
        assert gone.returncode == 0, gone.stdout + gone.stderr
        hub.end()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert box.tree() == before


def _confirmed(box: Box) -> int:
    earnings = json.loads(box.distensor("earnings", "--json").stdout or "{}")
    return int(earnings.get("earnings", earnings).get("confirmed_units") or 0)
