"""A service that is installed and failed is named, where the service manager can tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distensor_tui import absence
from distensor_tui.background import ask, explained, failed_exit

LAUNCHD = "org.distensor.server = {\n\tstate = not running\n\tlast exit code = 77: EX_NOPERM\n}\n"


@pytest.mark.parametrize(
    ("platform", "text", "code"),
    [
        ("linux", "ActiveState=failed\nExecMainStatus=77\n", 77),
        ("linux", "ActiveState=failed\nExecMainStatus=0\n", None),
        ("linux", "ActiveState=inactive\nExecMainStatus=77\n", None),
        ("linux", "Failed to connect to bus\n", None),
        ("linux", "", None),
        ("darwin", LAUNCHD, 77),
        ("darwin", LAUNCHD.replace("77: EX_NOPERM", "0"), None),
        ("darwin", LAUNCHD.replace("not running", "running"), None),
        ("darwin", "Could not find service\n", None),
    ],
)
def test_the_exit_of_a_failed_service(platform: str, text: str, code: int | None) -> None:
    asked: list[Sequence[str]] = []

    def run(words: Sequence[str]) -> str:
        asked.append(words)
        return text

    assert failed_exit(run, platform, uid=501) == code
    assert asked[0][0] == ("launchctl" if platform == "darwin" else "systemctl")


@pytest.mark.parametrize(
    ("code", "cause", "fix"),
    [(77, "bad key", "auth login"), (78, "a setting", "doctor"), (1, "its log", "service status")],
)
def test_not_running_says_how_the_service_ended(code: int, cause: str, fix: str) -> None:
    why = explained(absence.not_running(Path("/s")), lambda: code)
    assert f"installed but failed: last exit {code} ({cause}" in why.detail
    assert fix in why.fix[0]
    assert why.exit_code == 69


def test_other_reasons_are_left_alone() -> None:
    running = absence.not_running(Path("/s"))
    assert explained(running, lambda: None, Path("/nonexistent")) is running
    silent = absence.silent(Path("/s"), 5)
    assert explained(silent, lambda: 77) is silent


def test_a_service_of_the_machine_is_named_with_the_way_to_it(tmp_path: Path) -> None:
    unit = tmp_path / "distensor.service"
    unit.touch()
    why = explained(absence.not_running(Path("/s")), lambda: None, unit)
    assert "only root may look at" in why.detail
    assert why.fix[0].endswith("sudo distensor")
    assert "last exit 78" in explained(absence.not_running(Path("/s")), lambda: 78, unit).detail  # its own comes first


def test_a_manager_that_is_not_there_or_hangs_says_nothing() -> None:
    assert ask(["/nonexistent"]) == ""
    assert ask(["echo", "x"]) == "x\n"
