"""What a check says, and the world that it looks at. Everything outside comes in through `World`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from distensor.comm.address import HubAddress
from distensor.comm.tokens import JoinToken
from distensor.core.reading import Reading
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device
from distensor_server.keys.chain import KeyStore
from distensor_server.keys.model import FoundKey
from distensor_server.localclient import Snapshot
from distensor_server.service.manager import ServiceStatus


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the answer. `fix` is a command or a sentence; a check that is well needs none."""

    check: str
    level: Level
    finding: str
    fix: str = ""


def ok(check: str, finding: str) -> Finding:
    return Finding(check=check, level=Level.OK, finding=finding)


def warning(check: str, finding: str, fix: str) -> Finding:
    return Finding(check=check, level=Level.WARNING, finding=finding, fix=fix)


def fail(check: str, finding: str, fix: str) -> Finding:
    return Finding(check=check, level=Level.FAIL, finding=finding, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a child process said: its exit code (None: it did not end in time) and its output."""

    code: int | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The machine as a check may see it. Functions may block; each check has its time limit."""

    environment: Mapping[str, str]
    platform: str
    version: str
    uid: int
    state: Path
    socket: Path
    host: str
    root: Path
    """`/`, or a folder that stands for it."""
    hub: HubAddress | None
    """The hub of this machine's identity or key."""
    fingerprint: str | None
    registered: bool
    key: FoundKey | None
    key_problem: str | None
    """Why a key that is there cannot be used."""
    store: KeyStore
    look: Callable[[], Reading[Snapshot]]
    """The running supervisor; the reason's first word is the code of `localclient.NoAnswerError`."""
    wheels: Mapping[str, str | None]
    python: tuple[int, int, int]
    bits: int
    run: Callable[[Sequence[str], float], Said]
    devices: Callable[[], Sequence[Device]]
    memory: Callable[[], HostMemory]
    disk_free: Callable[[Path], int]
    open_files: int
    resolve: Callable[[str], Sequence[str]]
    """The addresses of a name; OSError."""
    connect: Callable[[HubAddress], float]
    """Seconds until the connection stood; OSError."""
    authority: Callable[[HubAddress, str], str]
    """`comm.bootstrap.fetch_authority`."""
    try_key: Callable[[str], JoinToken]
    """`comm.key_check`, blocking."""
    bind: Callable[[str], None]
    """Listen at this host, at any port, for a moment; OSError."""
    service: Callable[[], Reading[ServiceStatus]]


Check: TypeAlias = Callable[[World], "Finding | Sequence[Finding]"]


def run_child(words: Sequence[str], seconds: float) -> Said:
    """Run a command without input; output and errors together."""
    try:
        done = subprocess.run(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Said(code=None, text="")
    except OSError as error:
        return Said(code=127, text=str(error.strerror))
    return Said(code=done.returncode, text=done.stdout.decode(errors="replace"))
