"""The macOS installer with recorded answers of a Mac's commands: it has not run on a Mac yet."""

from __future__ import annotations

import pytest
from installer_kit import Box

pytestmark = pytest.mark.timeout(180)

UNAME = """#!/bin/sh
case "$1" in -m) echo "${FAKE_MACHINE:-arm64}" ;; *) echo Darwin ;; esac
"""
SW_VERS = "#!/bin/sh\necho 15.5\n"
LAUNCHCTL = """#!/bin/sh
# A launchd of one agent, in the domain gui/N, or only in user/N where FAKE_DOMAIN says so.
echo "$*" >>"$FAKE_SYSTEMD/calls"
domain="${FAKE_DOMAIN:-gui}/$(id -u)"
case "$1" in
    version) echo 'Darwin Bootstrapper Version 7.0.0' ;;
    print)
        case "$2" in "$domain"*) ;; *) echo 'Could not find domain' >&2; exit 113 ;; esac
        [ -e "$FAKE_SYSTEMD/loaded" ] || { echo 'Could not find service' >&2; exit 113; }
        printf 'gui = {\\n\\tstate = running\\n\\tpid = 4242\\n\\tlast exit code = (never exited)\\n}\\n'
        ;;
    bootstrap)
        [ "$2" = "$domain" ] || { echo 'Bootstrap failed: 125: Domain does not support it' >&2; exit 125; }
        touch "$FAKE_SYSTEMD/loaded"
        ;;
    bootout) rm -f "$FAKE_SYSTEMD/loaded" ;;
esac
exit 0
"""


@pytest.fixture
def mac(box: Box) -> Box:
    for name, text in (("uname", UNAME), ("sw_vers", SW_VERS), ("launchctl", LAUNCHCTL)):
        box.script(name, text)
    return box


def test_install_without_service_twice_and_uninstall(mac: Box) -> None:
    before = mac.tree()
    first = mac.run("macos.sh", "--no-service")
    assert first.returncode == 0, first.stderr
    assert "macOS 15.5, arm64" in first.stdout
    assert (mac.home / "Library/Application Support/distensor/app/current/bin/distensor").exists()
    assert "these wheels are installed already" in mac.run("macos.sh", "--no-service").stdout
    gone = mac.run("uninstall.sh")
    assert gone.returncode == 0, gone.stderr
    assert mac.tree() == before
    assert not [call for call in mac.calls if call.startswith(("bootstrap", "bootout"))]


def test_a_dry_run_changes_nothing(mac: Box) -> None:
    done = mac.run("macos.sh", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "LaunchAgents/org.distensor.server.plist" in done.stdout
    assert mac.tree() == {}


@pytest.mark.parametrize("domain", ["gui", "user"])
def test_an_agent_whose_python_is_gone_is_stopped_and_removed(mac: Box, domain: str) -> None:
    """What the uninstaller does without any program of ours."""
    mac.env["FAKE_DOMAIN"] = domain
    before = mac.tree()
    assert mac.run("macos.sh", "--no-service").returncode == 0
    agent = mac.home / "Library/LaunchAgents/org.distensor.server.plist"
    agent.parent.mkdir(parents=True, exist_ok=True)
    agent.write_text("<!-- distensor service install -->\n")
    (mac.systemd / "loaded").touch()
    for python in (mac.home / "Library/Application Support/distensor/app").glob("venv.*/bin/python*"):
        python.unlink()
    gone = mac.run("uninstall.sh")
    assert gone.returncode == 0, gone.stderr
    assert not (mac.systemd / "loaded").exists()
    assert any(call.startswith(f"bootout {domain}/") for call in mac.calls)
    agent.parent.rmdir()
    (mac.home / "Library").rmdir()
    assert mac.tree() == before


@pytest.mark.parametrize(
    ("env", "words", "said"),
    [
        ({"FAKE_MACHINE": "x86_64"}, [], "PyTorch has no build for Macs with Intel processors"),
        ({}, ["--system"], "--system: on macOS disTensor runs as an agent of the user"),
    ],
)
def test_what_no_mac_can_do_is_said(mac: Box, env: dict[str, str], words: list[str], said: str) -> None:
    done = mac.run("macos.sh", *words, env=env)
    assert done.returncode == 1
    assert said in done.stderr
    assert mac.tree() == {}


def test_linux_is_told_which_script_it_needs(box: Box) -> None:
    done = box.run("macos.sh")
    assert done.returncode == 1
    assert "use linux.sh on Linux" in done.stderr
