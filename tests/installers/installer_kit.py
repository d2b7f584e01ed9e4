"""An empty home with the installers beside it: real wheels, real environments, and a systemd that is a script.

Nothing is downloaded: the Python that the installer is given makes environments that see the packages of the tests'
own one, and pip installs the three wheels alone. The programs that run are those of the wheels.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALLERS = ROOT / "installers"
DISTRIBUTIONS = (ROOT, ROOT / "distributions/distensor-server", ROOT / "distributions/distensor-tui")

PYTHON = """#!/bin/sh
# A Python whose environments see the packages in {packages}.
real={real}
if [ "$1" = -m ] && [ "$2" = venv ]; then
    "$real" -m venv --without-pip "$3" || exit 1
    for site in "$3"/lib/python*/site-packages; do printf '%s\\n' '{packages}' >"$site/of_the_tests.pth"; done
    exit 0
fi
exec "$real" "$@"
"""

SYSTEMCTL = """#!/bin/sh
# A systemd of one service: it starts the ExecStart of the unit in the background and keeps its process number.
echo "$*" >>"$FAKE_SYSTEMD/calls"
[ "$1" != --user ] || shift
unit="$HOME/.config/systemd/user/distensor.service"
pid=$(cat "$FAKE_SYSTEMD/pid" 2>/dev/null)
end() {
    [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null
    while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    rm -f "$FAKE_SYSTEMD/pid"
}
case "$1" in
    show)
        case "$*" in *Version*) echo Version=252; exit 0 ;; esac
        state=inactive
        [ -z "$pid" ] || ! kill -0 "$pid" 2>/dev/null || state=active
        enabled=disabled
        [ ! -e "$FAKE_SYSTEMD/enabled" ] || enabled=enabled
        printf 'ExecMainCode=0\\nExecMainStatus=0\\nMainPID=%s\\n' "${pid:-0}"
        printf 'LoadState=loaded\\nActiveState=%s\\nUnitFileState=%s\\n' "$state" "$enabled"
        ;;
    enable) touch "$FAKE_SYSTEMD/enabled" ;;
    restart | start)
        end
        command=$(sed -n 's/^ExecStart=//p' "$unit")
        (exec </dev/null >>"$FAKE_SYSTEMD/log" 2>&1; eval "exec setsid $command") &
        echo $! >"$FAKE_SYSTEMD/pid"
        ;;
    disable | stop)
        end
        rm -f "$FAKE_SYSTEMD/enabled"
        ;;
esac
exit 0
"""


def build_wheels(into: Path) -> None:
    """The three wheels of this source tree, with their sums."""
    for folder in DISTRIBUTIONS:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--disable-pip-version-check", "--wheel-dir", str(into), str(folder)],
            check=True, timeout=120,
        )  # fmt: skip
    write_sums(into)


def write_sums(folder: Path, *, comment: str = "") -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(folder.iterdir())
        if path.suffix == ".whl"
    ]
    (folder / "SHA256SUMS").write_text("\n".join([*lines, *([comment] if comment else [])]) + "\n")


@cache
def may_mount() -> bool:
    """Whether mounts of its own may be had here, by root or anybody."""
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def packages() -> Path:
    """Where the packages lie that the wheels need."""
    spec = find_spec("grpc")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


@dataclass
class Box:
    """One home; `env` is all that the installers see of the machine."""

    folder: Path
    wheels: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.folder / "Heim von Jürgen"
        self.home.mkdir()
        self.bin = self.folder / "bin"
        self.bin.mkdir()
        self.systemd = self.folder / "systemd"
        self.systemd.mkdir()
        self.script("python", PYTHON.format(real=sys.executable, packages=packages()))
        self.env = {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.folder),
            "DISTENSOR_WHEELS": str(self.wheels),
            "DISTENSOR_PYTHON": str(self.bin / "python"),
            "DISTENSOR_PIP_ARGS": "--no-deps --no-index",
            "DISTENSOR_HEALTH_LOOKS": "80",
            "FAKE_SYSTEMD": str(self.systemd),
            **self.env,
        }

    def script(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def with_systemd(self) -> None:
        self.script("systemctl", SYSTEMCTL)

    @property
    def calls(self) -> list[str]:
        file = self.systemd / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def run(
        self, script: str, *words: str, env: Mapping[str, str] | None = None, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """bash SCRIPT WORDS, without a terminal."""
        return subprocess.run(
            ["bash", str(INSTALLERS / script), *words],
            env={**self.env, **(env or {})}, input=text, capture_output=True, text=True, timeout=120, check=False,
            start_new_session=True,
        )  # fmt: skip

    def distensor(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.home / ".local/bin/distensor"), *words],
            env=self.env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def killed_at(self, step: str, *words: str) -> None:
        """Run linux.sh, and kill -9 it with all that it started as soon as it says that it is at `step`."""
        process = subprocess.Popen(
            ["bash", str(INSTALLERS / "linux.sh"), *words],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith(f"-- {step}"):
                    break
            else:
                raise AssertionError(f"it never came to {step!r}")
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def tree(self) -> dict[str, str]:
        """Everything in the home: what a link points to, the sum of a file."""
        found = {}
        for path in sorted(self.home.rglob("*")):
            name = str(path.relative_to(self.home))
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            else:
                found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        return found
