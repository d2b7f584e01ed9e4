"""JSON lines between supervisor (our stdin) and worker (our stdout).

Standard output belongs to the protocol alone; whatever prints by accident goes to standard error.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any, TextIO

from distensor.core import DeviceId, Epoch, JobId, ParallelConfig, Rank
from distensor.core.control import DeviceKind
from distensor.core.errors import ConfigError, DistensorError


class ExitCode(IntEnum):
    """What the supervisor reads from our exit status."""

    DONE = 0
    BAD_ASSIGNMENT = 64
    REFUSED_PROGRAM = 65
    PEER_LOST = 69
    INTERNAL = 70
    HANDSHAKE = 77


class FailureCode(StrEnum):
    PEER_LOST = "peer_lost"
    REFUSED_PROGRAM = "refused_program"
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAssignment:
    """What this process is to be."""

    job_id: JobId
    job_name: str
    epoch: Epoch
    rank: Rank
    parallel: ParallelConfig
    device_kind: DeviceKind
    device_id: DeviceId
    listen_host: str
    listen_ports: tuple[int, int] | None = None
    """First and last port on which it may listen; None for any."""
    memory_limit: int | None
    threads: int

    @property
    def listen(self) -> tuple[str, tuple[int, int] | None]:
        """Where: `Listener.bind_one` takes it."""
        return self.listen_host, self.listen_ports


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerPlace:
    rank: Rank
    node_name: str
    hosts: tuple[str, ...]
    """Its addresses, the likeliest first."""
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyOrder:
    """Where the peers of an epoch are, and this rank's certificate for it."""

    job_id: JobId
    epoch: Epoch
    members: tuple[PeerPlace, ...]
    certificate_pem: str
    authority_pem: str
    relay: str = ""
    """host:port of a relay, or empty."""


def parse_assignment(data: Mapping[str, Any]) -> WorkerAssignment:
    """Raises ConfigError naming the field that is wrong."""
    device = _get(data, "device", dict)
    limit = data.get("memory_limit")
    try:
        kind = DeviceKind(_get(device, "kind", str))
    except ValueError as error:
        raise ConfigError(f"assignment: {error}") from error
    return WorkerAssignment(
        job_id=JobId(_get(data, "job", str)),
        job_name=_get(data, "job_name", str),
        epoch=Epoch(_get(data, "epoch", int)),
        rank=Rank(_get(data, "rank", int)),
        parallel=_parallel(data),
        device_kind=kind,
        device_id=DeviceId(_get(device, "id", str)),
        listen_host=_get(data, "listen_host", str),
        listen_ports=_ports(data.get("listen_ports")),
        memory_limit=limit if isinstance(limit, int) else None,
        threads=max(1, _get(data, "threads", int)),
    )


def parse_reassignment(data: Mapping[str, Any], now: WorkerAssignment) -> WorkerAssignment:
    """The same process as another rank of a later epoch. Raises ConfigError naming the field that is wrong."""
    epoch = Epoch(_get(data, "epoch", int))
    return replace(now, epoch=epoch, rank=Rank(_get(data, "rank", int)), parallel=_parallel(data))


def _ports(value: object) -> tuple[int, int] | None:
    """A supervisor of an older version says nothing of ports."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(port) is int for port in value):
        raise ConfigError(f"assignment: listen_ports is {value!r:.60}; expected two ports or null")
    first, last = value
    if not 0 < first <= last <= 65535:
        raise ConfigError(f"assignment: listen_ports is {first} to {last}; expected 1 <= first <= last <= 65535")
    return first, last


def _parallel(data: Mapping[str, Any]) -> ParallelConfig:
    try:
        return ParallelConfig(**_get(data, "parallel", dict))
    except TypeError as error:
        raise ConfigError(f"assignment: {error}") from error


def parse_topology(data: Mapping[str, Any]) -> TopologyOrder:
    """Raises ConfigError naming the field that is wrong."""
    certificate = _get(data, "certificate", dict)
    return TopologyOrder(
        job_id=JobId(_get(data, "job", str)),
        epoch=Epoch(_get(data, "epoch", int)),
        members=tuple(map(_place, _get(data, "members", list))),
        certificate_pem=_get(certificate, "certificate_pem", str),
        authority_pem=_get(certificate, "authority_pem", str),
        relay=_get({"relay": "", **data}, "relay", str),
    )


def _texts(data: Mapping[str, Any], key: str) -> list[str]:
    """A list of texts; an older supervisor leaves it out."""
    values = _get({key: [], **data}, key, list)
    return [_get({key: value}, key, str) for value in values]


def _place(member: Any) -> PeerPlace:
    if not isinstance(member, dict):
        raise ConfigError(f"message of the supervisor: a member {str(member)[:80]} should be an object")
    return PeerPlace(
        rank=Rank(_get(member, "rank", int)),
        node_name=_get(member, "node", str),
        hosts=(_get(member, "host", str), *_texts(member, "hosts")),
        port=_get(member, "port", int),
    )


def _get(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"message of the supervisor: {key}={str(value)[:80]!r} should be of type {kind.__name__}")
    return value


def parse_line(line: str) -> dict[str, Any]:
    """One message of the supervisor. Raises ConfigError for what is not a JSON object."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line of the supervisor is not JSON: {line[:80]!r}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"line of the supervisor is not an object: {line[:80]!r}")
    return data


class Mailbox:
    """What the supervisor says, by kind: `drain` and `pace` may come at any time and are queued behind nothing."""

    def __init__(self, on_pace: Callable[[Mapping[str, Any]], None] = lambda _message: None) -> None:
        self._on_pace = on_pace
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._draining = threading.Event()

    def deliver(self, message: dict[str, Any]) -> None:
        if message.get("type") == "drain":
            self._draining.set()
        elif message.get("type") == "pace":
            self._on_pace(message)
        else:
            self._messages.put(message)

    def take(self) -> dict[str, Any]:
        """The next message of another kind; blocks."""
        return self._messages.get()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def wait_for_drain(self) -> None:
        self._draining.wait()


class Emitter:
    """Writes messages to the supervisor; safe to use from several threads."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"type": kind, **fields}, allow_nan=False)
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (BrokenPipeError, ValueError):
                # The supervisor is gone; end of input on stdin ends this process in a moment.
                return

    def event(self, severity: str, text: str) -> None:
        self.emit("event", severity=severity, text=text)

    def failed(self, code: FailureCode, error: DistensorError | MemoryError | str) -> None:
        self.emit("failed", code=code.value, message=str(error) or type(error).__name__)


def claim_stdout() -> Emitter:
    """Take standard output for the protocol, and send every later `print` to standard error."""
    stream = sys.stdout
    sys.stdout = sys.stderr
    return Emitter(stream)
