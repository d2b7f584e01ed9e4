"""Why there is no supervisor to talk to: one text and one fix for each reason."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from distensor_tui import __version__
from distensor_tui.paths import LONGEST_SOCKET_PATH, SOCKET_VARIABLE
from distensor_tui.wire import SCHEMA_VERSION, Hello


class Reason(StrEnum):
    NOT_RUNNING = "not_running"
    NOT_PERMITTED = "not_permitted"
    OTHER_VERSION = "other_version"
    PATH_TOO_LONG = "path_too_long"
    NOT_A_SUPERVISOR = "not_a_supervisor"
    SILENT = "silent"


EXIT_CODES = {
    Reason.NOT_RUNNING: 69,
    Reason.SILENT: 69,
    Reason.NOT_PERMITTED: 77,
    Reason.OTHER_VERSION: 76,
    Reason.NOT_A_SUPERVISOR: 76,
    Reason.PATH_TOO_LONG: 78,
}
"""After sysexits: unavailable, no permission, protocol, configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """What is wrong, what it means and what to do, in words for the owner of the machine."""

    reason: Reason
    title: str
    detail: str
    fix: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.reason]


def not_running(path: Path, *, left_over: bool = False) -> Absence:
    """No socket there, or one that a supervisor left behind when it was killed."""
    detail = f"Nobody listens on {path}." if left_over else f"There is no socket at {path}."
    return Absence(
        reason=Reason.NOT_RUNNING,
        title="The supervisor is not running",
        detail=f"{detail} This machine does no work and earns nothing.",
        fix=(
            "start it:              distensor-server run",
            f"if it runs elsewhere:  distensor --socket PATH   (or set {SOCKET_VARIABLE})",
        ),
    )


def not_permitted(path: Path, owner: str | None) -> Absence:
    whose = f"It belongs to the user {owner}." if owner else "It belongs to another user."
    user = owner or "OWNER"
    return Absence(
        reason=Reason.NOT_PERMITTED,
        title="The supervisor's socket is not yours to open",
        detail=f"{path} exists, but you may not open it. {whose}",
        fix=(
            f"run it as that user:   sudo -u {user} distensor --socket {path}",
            "or start your own:     distensor-server run",
        ),
    )


def other_version(hello: Hello) -> Absence:
    older = "supervisor" if hello.schema_version < SCHEMA_VERSION else "dashboard"
    wheel = "distensor-server" if older == "supervisor" else "distensor-tui"
    return Absence(
        reason=Reason.OTHER_VERSION,
        title="The supervisor is of another version",
        detail=(
            f"It is {hello.server_version} and speaks schema {hello.schema_version}; "
            f"this dashboard is {__version__} and speaks schema {SCHEMA_VERSION}."
        ),
        fix=(
            f"update the {older}:  pip install --upgrade {wheel}",
            "and start it again" if older == "supervisor" else "and open it again",
        ),
    )


def path_too_long(path: Path) -> Absence:
    return Absence(
        reason=Reason.PATH_TOO_LONG,
        title="The path of the socket is too long",
        detail=(f"A socket path may have {LONGEST_SOCKET_PATH} bytes, this one has {len(str(path).encode())}: {path}"),
        fix=(f"give a shorter one to both:  {SOCKET_VARIABLE}=/tmp/distensor.sock",),
    )


def not_a_supervisor(path: Path, what: str) -> Absence:
    return Absence(
        reason=Reason.NOT_A_SUPERVISOR,
        title="That is not a disTensor supervisor",
        detail=f"{path} answered something else: {what}",
        fix=(f"check the path given by --socket or {SOCKET_VARIABLE}",),
    )


def silent(path: Path, seconds: float) -> Absence:
    return Absence(
        reason=Reason.SILENT,
        title="The supervisor does not answer",
        detail=f"{path} is open, but nothing came for {seconds:.0f} s. It may be stopped or overloaded.",
        fix=(
            "look at it:            ps -o pid,stat,etime,args -C distensor-server",
            "start it again:        distensor-server run",
        ),
    )


def from_os_error(error: OSError, path: Path) -> Absence:
    """The errors of connecting to a Unix socket."""
    if isinstance(error, PermissionError):
        return not_permitted(path, _owner(path))
    if isinstance(error, FileNotFoundError):
        return not_running(path)
    if error.errno in (errno.ENOTSOCK, errno.EPROTOTYPE, errno.ENOTDIR) or path.is_file():
        return not_a_supervisor(path, "it is not a socket")
    return not_running(path, left_over=True)


def _owner(path: Path) -> str | None:
    """The first part of the path that can be looked at tells whose it is."""
    for place in (path, *path.parents):
        try:
            return place.owner()
        except (OSError, KeyError):
            continue
    return None
