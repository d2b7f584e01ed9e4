"""What these commands share: where things are, one JSON object a line, errors as cause, fix and code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from distensor_server.cli import ExitCode
from distensor_server.config import default_socket_path, default_state_dir
from distensor_server.redact import redact_keys
from distensor_server.service.layout import system_layout


class UsageError(Exception):
    """A command line that cannot be read."""


class Parser(argparse.ArgumentParser):
    """argparse that leaves to its caller how an error is told."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser(verb: str, about: str) -> Parser:
    """A parser with what every command takes."""
    made = Parser(prog=f"distensor {verb}", description=about, allow_abbrev=False)
    common(made)
    return made


def common(made: argparse.ArgumentParser, *, nested: bool = False) -> None:
    """`nested`: for a command behind a command, which may not undo what was said before it."""
    gone: Any = argparse.SUPPRESS if nested else None
    made.add_argument("--json", action="store_true", default=gone or False, help="one JSON object on one line")
    made.add_argument("--socket", type=Path, default=gone, metavar="PATH", help="the supervisor's socket")
    made.add_argument("--state", type=Path, default=gone, metavar="DIR", help="the supervisor's state directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where the supervisor of this user keeps what it has."""

    socket: Path
    state: Path


SYSTEM_SOCKET = Path("/run/distensor/supervisor.sock")
"""Of the machine's own service, which only root and the service may open."""


def places(options: argparse.Namespace) -> Places:
    """What was named, or of the machine's service (`--system`), or of this user."""
    system = getattr(options, "system", False) or only_the_systems()
    socket = SYSTEM_SOCKET if system else default_socket_path(os.environ, sys.platform)
    state = system_layout().state if system else default_state_dir(os.environ)
    return Places(socket=(options.socket or socket).absolute(), state=(options.state or state).absolute())


def only_the_systems() -> bool:
    """Root looks at the machine's service where there is none of its own, as the dashboard does."""
    return os.access(SYSTEM_SOCKET, os.F_OK) and not default_socket_path(os.environ, sys.platform).exists()


def done(options: argparse.Namespace, value: Mapping[str, Any], text: str) -> int:
    """Say an answer that went well."""
    say(options, {"ok": True, **value}, text)
    return ExitCode.OK


def say(options: argparse.Namespace, value: Mapping[str, Any], text: str) -> None:
    """Print an answer in the form that was asked for."""
    write(sys.stdout, json.dumps({"v": 1, **value}, separators=(",", ":")) if options.json else text)


def fail(*, as_json: bool, code: str, message: str, fix: str, exit_code: ExitCode) -> int:
    """Say an error. What somebody typed is not repeated where it is a key."""
    message = redact_keys(message)
    if as_json:
        error = {"code": code, "message": message, "fix": fix}
        write(sys.stdout, json.dumps({"v": 1, "ok": False, "error": error}, separators=(",", ":")))
    else:
        write(sys.stderr, f"distensor: {message}\n  {fix}\n  ({code}, exit {int(exit_code)})")
    return exit_code


def write(stream: TextIO, text: str) -> None:
    """Write what the stream can carry; other characters become question marks."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()
