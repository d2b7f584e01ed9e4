"""The folder of a local session: locked while its process lives, removed by the next one where it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distensor.core import SYSTEM_CLOCK
from distensor.core.errors import SessionError
from distensor.testing.clock import FakeClock
from distensor.training.local import YOUNG_SECONDS, LocalCluster, make_folder


def later() -> FakeClock:
    """A clock by which everything on the disk is old."""
    clock = FakeClock()
    clock.jump_wall(SYSTEM_CLOCK.now() - clock.now() + 10 * YOUNG_SECONDS)
    return clock


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    folder, lock = make_folder(SYSTEM_CLOCK, tmp_path)
    other, other_lock = make_folder(later(), tmp_path)
    assert folder.is_dir()
    assert other != folder
    lock.close()
    other_lock.close()


def test_a_folder_whose_process_was_killed_goes(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from distensor.core import SYSTEM_CLOCK;"
        "from distensor.training.local import make_folder;"
        "folder, lock = make_folder(SYSTEM_CLOCK, Path(sys.argv[1])); (folder / 'authority.key').write_text('secret');"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    _, young = make_folder(SYSTEM_CLOCK, tmp_path)
    assert left.is_dir(), "a brand-new folder may only not be locked yet"
    _, lock = make_folder(later(), tmp_path)
    assert not left.exists()
    young.close()
    lock.close()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "distensor-link").symlink_to(target)
    (tmp_path / "distensor-file").touch()
    (tmp_path / "distensor-without-lock").mkdir()
    _, lock = make_folder(later(), tmp_path)
    assert target.is_dir()
    assert {path.name for path in tmp_path.iterdir()} >= {"distensor-link", "distensor-file", "distensor-without-lock"}
    lock.close()
    assert [path.name for path in target.iterdir()] == ["lock"]


def test_more_nodes_than_workers_are_refused() -> None:
    with pytest.raises(SessionError, match="workers=1, nodes=2"):
        LocalCluster(workers=1, nodes=2, clock=SYSTEM_CLOCK)
