"""`distensor service install|uninstall|status` and `distensor uninstall`: verbs of the wheel distensor-server."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import ConfigError, DistensorError, ServiceError
from distensor.core.reading import Unavailable
from distensor_server.service import actions
from distensor_server.service.launchd import Launchd
from distensor_server.service.layout import Layout, program, system_layout, user_layout
from distensor_server.service.manager import ServiceManager, ServiceState, ServiceStatus
from distensor_server.service.manifest import Manifest
from distensor_server.service.runner import Runner, run_command
from distensor_server.service.systemd import Systemd, manager_environment

OK, USAGE, UNAVAILABLE, CANNOT_CREATE, BAD_CONFIG = 0, 64, 69, 73, 78
UNINSTALLER = Path(__file__).with_name("uninstall.sh")


class _UsageError(Exception):
    """A command line that cannot be read, and the usage of the command."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.format_usage().strip())


def main(argv: Sequence[str] | None = None) -> int:
    """`distensor service`."""
    return _run(
        _service_parser(), argv, "service", lambda options: _service(options, os.environ, sys.platform, run_command)
    )


def _service_parser() -> _Parser:
    parser = _Parser(
        prog="distensor service", description="Runs the supervisor in the background, from the start of the session."
    )
    what = parser.add_subparsers(dest="what", required=True, metavar="install|uninstall|status")
    for name, about in (
        ("install", "write the unit and start it"),
        ("uninstall", "stop it and remove the unit"),
        ("status", "does it run, how did it end last"),
    ):
        verb = what.add_parser(name, help=about, description=about.capitalize())
        verb.add_argument("--json", action="store_true", help="one JSON object on one line")
        verb.add_argument("--system", action="store_true", help="for the machine instead of this user (Linux, root)")
        if name != "status":
            verb.add_argument("--dry-run", action="store_true", help="say what would be done, change nothing")
        if name == "install":
            verb.add_argument(
                "--keep-running", action="store_true", help="do not restart it where it runs already from this unit"
            )
    return parser


def _service(
    options: argparse.Namespace, environment: Mapping[str, str], platform: str, run: Runner
) -> tuple[int, dict[str, Any], str]:
    """Exit code, answer, and the same as text."""
    layout = chosen_layout(environment, platform, run, system=options.system)
    manager = chosen_manager(layout, platform, run)
    if options.what == "status":
        found = actions.status(manager)
        return (OK if actions.healthy(found) else UNAVAILABLE), described(found), told(found)
    said: list[str] = []
    manifest = Manifest(layout.manifest)
    if options.what == "install":
        actions.install(manager, manifest, said.append, dry_run=options.dry_run, keep_running=options.keep_running)
    else:
        actions.uninstall(manager, manifest, said.append, dry_run=options.dry_run)
    return OK, {"done": said}, "\n".join(said)


def chosen_layout(environment: Mapping[str, str], platform: str, run: Runner, *, system: bool) -> Layout:
    """Raises ConfigError where there is no such kind of service."""
    if system and platform == "darwin":
        raise ConfigError("--system: on macOS disTensor runs as an agent of the user; leave --system out")
    if system:
        return system_layout()
    # Asked only where it can differ: it is a process of its own.
    unusual = platform != "darwin" and environment.get("XDG_CONFIG_HOME")
    return user_layout(environment, platform, manager_environment(run) if unusual else {})


def chosen_manager(layout: Layout, platform: str, run: Runner) -> ServiceManager:
    if platform == "darwin":
        return Launchd(layout, program(layout), run, SYSTEM_CLOCK, os.getuid())
    return Systemd(layout, program(layout), run)


def described(found: ServiceStatus) -> dict[str, Any]:
    """The JSON of a status: what is not available is null, with the reason beside it."""
    row: dict[str, Any] = {
        "manager": found.manager,
        "unit": str(found.unit),
        "state": found.state.value,
        "enabled": found.enabled,
    }
    for name, reading in (("pid", found.pid), ("last_exit", found.last_exit)):
        row[name] = None if isinstance(reading, Unavailable) else reading
        if isinstance(reading, Unavailable):
            row[f"{name}_unavailable"] = reading.reason
    return row


def told(found: ServiceStatus) -> str:
    if found.state is ServiceState.NOT_INSTALLED:
        return "not installed\n  distensor service install"
    starts = "starts with the session" if found.enabled else "does not start by itself"
    rows = [f"{found.state} ({found.manager}, {starts})", f"unit {found.unit}"]
    if not isinstance(found.pid, Unavailable):
        rows.append(f"process {found.pid}")
    if not isinstance(found.last_exit, Unavailable):
        rows.append(f"last exit {found.last_exit}{_MEANING.get(found.last_exit, '')}")
    return "\n".join(rows)


_MEANING = {
    0: " (stopped as it should be)",
    77: " (the key is refused or readable by others: distensor auth status)",
    78: " (a setting is wrong: distensor doctor)",
}


def uninstall(argv: Sequence[str] | None = None) -> int:
    """`distensor uninstall`: runs the script that also removes an installation whose Python is gone."""
    parser = _Parser(prog="distensor uninstall", description="Removes what was installed, exactly.")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, change nothing")
    parser.add_argument("--purge", action="store_true", help="identity, receipts, settings and logs too")
    parser.add_argument("--system", action="store_true", help="the installation of the machine (Linux, root)")
    return _run(parser, argv, "uninstall", _uninstall)


def _uninstall(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    words = [f"--{name}" for name in ("dry-run", "purge", "system") if getattr(options, name.replace("-", "_"))]
    # Over standard input: the file itself is among what is removed. Its words are shown as they come, for removing
    # takes a while, except where they are to be one JSON object.
    done = subprocess.run(
        ["bash", "-s", "--", *words],  # noqa: S607 - wherever the system has its bash
        input=UNINSTALLER.read_bytes(),
        stdout=subprocess.PIPE if options.json else None,
        stderr=subprocess.STDOUT if options.json else None,
        check=False,
    )
    text = (done.stdout or b"").decode(errors="replace").strip()
    if done.returncode and options.json:
        raise ServiceError(text or f"the uninstaller ended with {done.returncode}")
    return UNAVAILABLE if done.returncode else OK, {"done": text.splitlines()}, ""


Act: TypeAlias = Callable[[argparse.Namespace], tuple[int, dict[str, Any], str]]
"""Gives the exit code, the answer, and the same as text."""


def _run(parser: _Parser, argv: Sequence[str] | None, verb: str, act: Act) -> int:
    """Print what `act` answers, or its error with a fix, in the form that was asked for."""
    words = sys.argv[1:] if argv is None else argv
    try:
        options = parser.parse_args(words)
        code, answer, text = act(options)
    except _UsageError as wrong:
        return _wrong_usage(wrong, verb, as_json="--json" in words)
    except DistensorError as error:
        return _failed(options, error)
    if options.json:
        print(json.dumps({"v": 1, "ok": code == OK, **answer}))
    elif text:
        print(text)
    return int(code)


def _wrong_usage(wrong: _UsageError, verb: str, *, as_json: bool) -> int:
    fix = f"`distensor help {verb}` shows examples"
    if as_json:
        _print_error("usage", str(wrong), fix)
    else:
        print(f"{wrong.usage}\ndistensor {verb}: {wrong}\n  {fix}", file=sys.stderr)
    return USAGE


_CODES: tuple[tuple[type[DistensorError], str, int], ...] = (
    (ConfigError, "config", BAD_CONFIG),
    (ServiceError, "service", UNAVAILABLE),
    (DistensorError, "not_kept", CANNOT_CREATE),
)


def _failed(options: argparse.Namespace, error: DistensorError) -> int:
    word, code = next((word, code) for kind, word, code in _CODES if isinstance(error, kind))
    message, _, fix = str(error).partition("\n")
    if options.json:
        _print_error(word, message, fix.strip())
    else:
        print(f"distensor: {error}", file=sys.stderr)
    return code


def _print_error(code: str, message: str, fix: str) -> None:
    print(json.dumps({"v": 1, "ok": False, "error": {"code": code, "message": message, "fix": fix}}))
