"""An installation of the whole machine, end to end: real paths in mounts of its own, and a systemd that is a script."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installer_kit import INSTALLERS, Box, may_mount

from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not may_mount(), reason="this machine lets no user mount anything"),
    pytest.mark.skipif(
        any(Path(sys.base_prefix).is_relative_to(place) for place in ("/opt", "/usr/local", "/var")),
        reason="the Python that runs the tests lies where the installation goes",
    ),
]
PLACES = ("etc", "opt", "run", "usr/local/bin", "var/lib")
NEEDED = ("passwd", "group", "os-release", "ld.so.cache", "nsswitch.conf", "localtime", "alternatives")
KEYS = [
    JoinToken(address=parse_address("127.0.0.1:1"), fingerprint="ab" * 32, role=Role.NODE, secret=secret * 43).encode()
    for secret in "xy"
]

SYSTEMCTL = """#!/bin/bash
# systemd for one unit of the system: what it does for DynamicUser=, StateDirectory=, LoadCredential= and the like,
# all as the one user that there is.
echo "$*" >>"$FAKE_SYSTEMD/calls"
unit=/etc/systemd/system/distensor.service
pid=$(cat "$FAKE_SYSTEMD/pid" 2>/dev/null)
end() {
    [ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null
    while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    rm -rf "$FAKE_SYSTEMD/pid" /run/distensor /run/credentials
}
case "$1" in
    show)
        case "$*" in *Version*) echo Version=252; exit 0 ;; esac
        state=inactive
        [ -z "$pid" ] || ! kill -0 "$pid" 2>/dev/null || state=active
        printf 'ExecMainCode=0\\nExecMainStatus=0\\nMainPID=%s\\n' "${pid:-0}"
        printf 'LoadState=loaded\\nActiveState=%s\\nUnitFileState=enabled\\n' "$state"
        ;;
    restart)
        end
        grep -q '^DynamicUser=yes' "$unit" && grep -q '^StateDirectory=distensor' "$unit" || exit 1
        mkdir -p -m 700 /var/lib/private/distensor /run/distensor /run/credentials
        ln -sfn private/distensor /var/lib/distensor
        credential=$(sed -n 's/^LoadCredential=//p' "$unit")
        if [ -n "$credential" ]; then
            cp "${credential#*:}" "/run/credentials/${credential%%:*}" || exit 1
        fi
        command=$(sed -n 's/^ExecStart=//p' "$unit")
        export $(sed -n 's/^Environment=//p' "$unit") STATE_DIRECTORY=/var/lib/distensor
        export RUNTIME_DIRECTORY=/run/distensor CONFIGURATION_DIRECTORY=/etc/distensor
        export CREDENTIALS_DIRECTORY=/run/credentials
        (exec </dev/null >>"$FAKE_SYSTEMD/log" 2>&1; unset HOME; eval "exec setsid $command") &
        echo $! >"$FAKE_SYSTEMD/pid"
        ;;
    disable | stop) end ;;
esac
exit 0
"""

IN_MOUNTS = """
for place in %s; do mount --bind "$BOX/root/$place" "/$place" || exit 99; done
%s
"""


class Machine:
    """Below `root` lies what the scripts see at the real places."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.root = box.folder / "root"
        for place in PLACES:
            (self.root / place).mkdir(parents=True)
        for name in NEEDED:
            found = Path("/etc") / name
            if found.is_dir():
                shutil.copytree(found, self.root / "etc" / name, symlinks=True)
            elif found.exists():
                shutil.copy(found, self.root / "etc" / name)
        (self.root / "etc/systemd/system").mkdir(parents=True)
        box.script("systemctl", SYSTEMCTL)

    def run(self, script: str, *, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """A script as root, with all places mounted."""
        return subprocess.run(
            ["unshare", "-rm", "bash", "-c", IN_MOUNTS % (" ".join(PLACES), script)],
            env={**self.box.env, "BOX": str(self.box.folder), "INSTALLERS": str(INSTALLERS), **env},
            input=text, capture_output=True, text=True, timeout=150, check=False, start_new_session=True,
        )  # fmt: skip

    def tree(self) -> dict[str, str]:
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            else:
                found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        return found


# One script, because what was started has to live in the mounts in which it was started.
WHOLE_WAY = """
set -e
say() { echo "== $*"; }
mode() { stat -c '%a %n' "$1"; }
export DISTENSOR_API_KEY="$FIRST"
bash "$INSTALLERS/linux.sh" --system
unset DISTENSOR_API_KEY
say installed
mode /etc/distensor; mode /etc/distensor/key; mode /var/lib/private/distensor; mode /opt/distensor/current/
grep -v '^#' /etc/systemd/system/distensor.service | grep -E '^(ExecStart|LoadCredential|DynamicUser|StateDirectory)='
distensor status | head -n 1
distensor auth status
grep -rlF "$FIRST" /etc /opt /var/lib | sort
say again
bash "$INSTALLERS/linux.sh" --system
say login
printf '%s' "$SECOND" | distensor auth login --system --stdin --no-test
for i in $(seq 100); do distensor status >/dev/null 2>&1 && break; sleep 0.1; done
distensor auth status
say dashboard
mount -o remount,bind,ro /etc  # ProtectSystem=strict
printf '%s' "$FIRST" >/run/key
distensor auth login --stdin --no-test --socket /run/distensor/supervisor.sock 2>&1 </run/key || echo "refused $?"
rm /run/key
mount -o remount,bind,rw /etc
say uninstall
distensor uninstall --system --purge
"""


def test_the_whole_machine_from_nothing_to_nothing(box: Box) -> None:
    machine = Machine(box)
    before = machine.tree()
    try:
        done = machine.run(WHOLE_WAY, FIRST=KEYS[0], SECOND=KEYS[1], PATH=f"/usr/local/bin:{box.env['PATH']}")
    finally:
        log = (box.systemd / "log").read_text() if (box.systemd / "log").exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + log
    parts = dict(part.split("\n", 1) for part in f"install\n{done.stdout}".split("== "))
    assert "is installed and its supervisor answers" in parts["install"]
    assert "the hub does not answer now; the key is kept without having been tried" in done.stderr
    installed = parts["installed"]
    for line in (
        "755 /etc/distensor",
        "600 /etc/distensor/key",
        "700 /var/lib/private/distensor",
        "755 /opt/distensor/current/",
        'ExecStart="/opt/distensor/current/bin/distensor-server" run',
        "LoadCredential=distensor_api_key:/etc/distensor/key",
        "DynamicUser=yes",
        "StateDirectory=distensor",
    ):
        assert line in installed.splitlines()
    assert "from credentials (/run/credentials/distensor_api_key)" in installed
    assert installed.splitlines()[-1] == "/etc/distensor/key"  # and nowhere else
    assert "it runs already" in parts["again"]
    assert "kept in /etc/distensor/key, for the hub at 127.0.0.1:1" in parts["login"]
    assert f"...{KEYS[1][-4:]} from credentials" in parts["login"]
    assert "sudo distensor auth login --system" in parts["dashboard"]
    assert "refused 73" in parts["dashboard"]
    for key in KEYS:
        assert key not in done.stdout + done.stderr + log
    assert "Removed; nothing is left." in parts["uninstall"]
    assert not (box.systemd / "pid").exists()
    gone = machine.tree()
    for left in ("run/mount", "var/lib/private"):  # what mount and systemd make for themselves
        gone.pop(left, None)
    assert gone == before
