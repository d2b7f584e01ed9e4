"""The lines between supervisor and worker: JSON objects, one a line, validated before anything believes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from distensor.core.control import Assignment, Certificate, DeviceKind, Topology

MAX_LINE = 256 * 1024
"""A worker's line is small; the longest is `ready` with a certificate request of about 1 KB."""
MAX_TEXT = 2000
SEVERITIES = ("info", "warning", "error")
PHASES = ("loading", "training", "waiting")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """`epoch` is the one that it wants to take part in; None for that of its assignment."""

    port: int
    csr_pem: str
    epoch: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected:
    pass


PATHS = ("here", "lan", "ipv6", "public", "relay")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """Bytes since the worker's start, to and from one peer; the round trip, and how long ago it was measured."""

    peer: int
    sent: int
    received: int
    rtt_ms: float | None = None
    rtt_age_s: float | None = None
    path: str | None = None
    """By which way the peer is reached: here, lan, ipv6, public or relay; None while nobody has said it."""
    line_rate: float | None = None
    """Bytes a second at which the newest large message of the peer came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaBytes:
    """What a worker sent to the other replicas in its last step and got from them; `ring` is what a ring all-reduce of
    its gradients sends. `how` they agree is the trainer's word."""

    how: str
    up: int
    down: int
    ring: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    phase: str
    step: int
    total_steps: int | None
    stages: tuple[int, ...]
    loss: float | None
    tokens_per_second: float | None
    compute_s: float
    sync_s: float
    wait_s: float
    links: tuple[LinkBytes, ...]
    rss: int
    replicas: ReplicaBytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """`epoch` and `rank` are those in which the step was done; None for those of the assignment."""

    step: int
    micro_batches: int
    epoch: int | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    severity: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """A line that is not the protocol: kept as a value, because a worker's bad line must not stop anything."""

    reason: str
    sample: str


WorkerMessage: TypeAlias = Ready | Connected | Progress | Claim | Note | Failed | Garbage


def parse_worker_line(line: bytes) -> WorkerMessage:
    """What a worker said. Never raises: anything unexpected is `Garbage` with its reason."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        parser = _PARSERS.get(fields.get("type"))
        if parser is None:
            raise ValueError(f"unknown type {fields.get('type')!r:.60}")
        return parser(fields)
    except (ValueError, TypeError, RecursionError) as error:
        # TypeError: an unhashable `type`. RecursionError: a line of thousands of brackets.
        return Garbage(reason=clean_text(str(error), 200), sample=clean_text(line[:80].decode("utf-8", "replace"), 80))


def clean_text(text: str, limit: int = MAX_TEXT) -> str:
    """Text of a stranger for logs and screens: one line, no control characters, bounded."""
    short = text[:limit]
    return "".join(char if char.isprintable() else " " for char in short).strip()


def _ready(fields: Mapping[str, Any]) -> Ready:
    if fields.get("v") != 1:
        raise ValueError(f"ready: protocol version {fields.get('v')!r:.20}, expected 1")
    port = _integer(fields, "port")
    if not 1 <= port <= 65535:
        raise ValueError(f"ready: port {port}, expected 1 to 65535")
    return Ready(port=port, csr_pem=_text(fields, "csr", 16384), epoch=_optional(fields, "epoch", _integer))


def _connected(_fields: Mapping[str, Any]) -> Connected:
    return Connected()


def _progress(fields: Mapping[str, Any]) -> Progress:
    return Progress(
        phase=_one_of(fields, "state", PHASES),
        step=_integer(fields, "step"),
        total_steps=_optional(fields, "total_steps", _integer),
        stages=tuple(_bounded_list(fields, "stages", _as_integer)),
        loss=_optional(fields, "loss", _number),
        tokens_per_second=_optional(fields, "tokens_per_second", _number),
        compute_s=_seconds(fields, "compute_s"),
        sync_s=_seconds(fields, "sync_s"),
        wait_s=_seconds(fields, "wait_s"),
        links=tuple(_bounded_list(fields, "links", _link)),
        rss=_integer(fields, "rss"),
        replicas=_replicas(fields.get("replicas")),
    )


def _replicas(value: Any) -> ReplicaBytes | None:
    """Nothing said: there is one replica, or an older worker."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"replicas {value!r:.60}, expected an object")
    return ReplicaBytes(
        how=clean_text(_text(value, "how", 32)),
        up=_integer(value, "up"),
        down=_integer(value, "down"),
        ring=_integer(value, "ring"),
    )


def _path(fields: Mapping[str, Any], name: str) -> str:
    return _one_of(fields, name, PATHS)


def _link(value: Any) -> LinkBytes:
    if not isinstance(value, dict):
        raise ValueError("expected objects")
    peer = value.get("peer")
    if not isinstance(peer, int) or isinstance(peer, bool) or peer < -1:
        raise ValueError(f"peer {peer!r:.20}, expected a rank or -1")
    return LinkBytes(
        peer=peer,
        sent=_integer(value, "sent"),
        received=_integer(value, "received"),
        rtt_ms=_optional(value, "rtt_ms", _seconds),
        rtt_age_s=_optional(value, "rtt_age_s", _seconds),
        path=_optional(value, "path", _path),
        line_rate=_optional(value, "line_rate", _seconds),
    )


def _claim(fields: Mapping[str, Any]) -> Claim:
    micro_batches = _integer(fields, "micro_batches")
    if micro_batches < 1:
        raise ValueError("claim: micro_batches 0, expected at least 1")
    return Claim(
        step=_integer(fields, "step"),
        micro_batches=micro_batches,
        epoch=_optional(fields, "epoch", _integer),
        rank=_optional(fields, "rank", _integer),
    )


def _note(fields: Mapping[str, Any]) -> Note:
    return Note(severity=_one_of(fields, "severity", SEVERITIES), text=clean_text(_text(fields, "text", 16384)))


def _failed(fields: Mapping[str, Any]) -> Failed:
    return Failed(code=_text(fields, "code", 64), message=clean_text(_text(fields, "message", 65536)))


_PARSERS: dict[Any, Callable[[Mapping[str, Any]], WorkerMessage]] = {
    "ready": _ready,
    "connected": _connected,
    "progress": _progress,
    "claim": _claim,
    "event": _note,
    "failed": _failed,
}


def _text(fields: Mapping[str, Any], name: str, limit: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"{name}: expected text of at most {limit} characters")
    return value


def _one_of(fields: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    value = fields.get(name)
    if value not in allowed:
        raise ValueError(f"{name}: {value!r:.40}, expected one of {', '.join(allowed)}")
    return str(value)


def _as_integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40}, expected a whole number of at least 0")
    return value


def _integer(fields: Mapping[str, Any], name: str) -> int:
    try:
        return _as_integer(fields.get(name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    """A number; None when it is not finite, because JSON for others cannot carry it."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        raise ValueError(f"{name}: {value!r:.40}, expected a number")
    return None if math.isnan(value) else float(value)


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = _number(fields, name)
    if value is None or value < 0:
        raise ValueError(f"{name}: expected seconds of at least 0")
    return value


def _optional(fields: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], Any]) -> Any:
    return None if fields.get(name) is None else read(fields, name)


def _bounded_list(fields: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > 4096:
        raise ValueError(f"{name}: expected a list of at most 4096")
    try:
        return [read(item) for item in value]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# supervisor -> worker


def assign_line(
    assignment: Assignment,
    *,
    device_kind: DeviceKind,
    listen_host: str,
    listen_ports: tuple[int, int] | None = None,
    memory_limit: int | None,
    threads: int,
) -> bytes:
    return encode_line(
        {
            "type": "assign",
            "v": 1,
            "job": assignment.job_id,
            "job_name": assignment.job_name,
            **_place(assignment),
            "device": {"kind": device_kind.value, "id": assignment.device_id},
            "listen_host": listen_host,
            "listen_ports": listen_ports,
            "memory_limit": memory_limit,
            "threads": threads,
        }
    )


def reassign_line(assignment: Assignment) -> bytes:
    """The worker goes on, with all that it holds, as another rank of a later epoch of its job."""
    return encode_line({"type": "reassign", "v": 1, **_place(assignment)})


def _place(assignment: Assignment) -> dict[str, Any]:
    parallel = assignment.parallel
    return {
        "epoch": assignment.epoch,
        "rank": assignment.rank,
        "parallel": {
            "data_parallel": parallel.data_parallel,
            "tensor_parallel": parallel.tensor_parallel,
            "pipeline_parallel": parallel.pipeline_parallel,
            "context_parallel": parallel.context_parallel,
            "order": parallel.order,
        },
    }


def topology_line(topology: Topology, certificate: Certificate) -> bytes:
    members = [
        {
            "rank": member.rank,
            "node": member.node_id,
            "name": member.node_name,
            "host": member.host,
            "hosts": list(member.hosts),
            "port": member.port,
        }
        for member in topology.members
    ]
    own = {
        "rank": certificate.rank,
        "certificate_pem": certificate.certificate_pem,
        "authority_pem": certificate.authority_pem,
    }
    return encode_line(
        {
            "type": "topology",
            "job": topology.job_id,
            "epoch": topology.epoch,
            "members": members,
            "relay": topology.relay,
            "certificate": own,
        }
    )


def pace_line(*, duty: float, send_rate: float | None, receive_rate: float | None) -> bytes:
    """`duty`: the share of its time in which a worker may compute. Rates in bytes per second; None: no limit."""
    return encode_line({"type": "pace", "duty": duty, "send_rate": send_rate, "receive_rate": receive_rate})


def drain_line(seconds: float) -> bytes:
    return encode_line({"type": "drain", "seconds": seconds})


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Compact JSON and a newline. Refuses NaN: not every reader of JSON knows it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


NO_PACE = pace_line(duty=1.0, send_rate=None, receive_rate=None)
"""What holds for a worker that was told nothing."""
