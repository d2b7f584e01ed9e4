"""The local socket's language: one JSON object a line. Pure; bytes in, typed messages out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
LONGEST_LINE = 16 << 20
"""A snapshot of a thousand workers is under 1 MiB; anything over this is not a supervisor."""


class WireError(ValueError):
    """A line that is not part of the protocol. Says what was wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first line of a supervisor."""

    schema_version: int
    server_version: str
    node: str
    pid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A snapshot (`full`) or the changed sections only."""

    full: bool
    seq: int
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the supervisor said to a request."""

    id: str
    ok: bool
    result: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    message: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """A message of a kind that this version does not know; a newer supervisor may send some."""

    kind: str


Message = Hello | Update | Answer | Unknown


def decode(line: bytes | str) -> Message:
    """One line of the supervisor. Raises WireError when it is not JSON of this protocol."""
    raw = _json_object(line)
    kind = raw.get("type")
    if kind == "hello":
        return _hello(raw)
    if kind in ("snapshot", "delta"):
        return _update(raw, full=kind == "snapshot")
    if kind == "response":
        return _answer(raw)
    if isinstance(kind, str):
        return Unknown(kind=kind)
    raise WireError(f"a message without a type: {_excerpt(line)}")


def encode_request(request_id: str, method: str, params: Mapping[str, Any]) -> bytes:
    body = {"type": "request", "id": request_id, "method": method, "params": dict(params)}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _json_object(line: bytes | str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise WireError(f"not JSON: {_excerpt(line)}") from error
    except RecursionError as error:
        raise WireError("JSON nested too deeply") from error
    if not isinstance(raw, dict):
        raise WireError(f"a JSON object was expected, got {_excerpt(line)}")
    return raw


def _excerpt(line: bytes | str) -> str:
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    return repr(text[:60])


def _hello(raw: Mapping[str, Any]) -> Hello:
    version = raw.get("schema_version")
    if not isinstance(version, int):
        raise WireError(f"hello without a schema_version number: {version!r}")
    pid = raw.get("pid")
    return Hello(
        schema_version=version,
        server_version=str(raw.get("server_version", "unknown")),
        node=str(raw.get("node", "")),
        pid=pid if isinstance(pid, int) else None,
    )


def _update(raw: Mapping[str, Any], *, full: bool) -> Update:
    data, seq = raw.get("data"), raw.get("seq")
    if not isinstance(data, dict):
        raise WireError(f"an update whose data is {type(data).__name__}, not an object")
    return Update(full=full, seq=seq if isinstance(seq, int) else 0, data=data)


def _answer(raw: Mapping[str, Any]) -> Answer:
    result, error = raw.get("result"), raw.get("error")
    problem = error if isinstance(error, dict) else {}
    return Answer(
        id=str(raw.get("id", "")),
        ok=raw.get("ok") is True,
        result=result if isinstance(result, dict) else {},
        code=str(problem.get("code", "")),
        message=str(problem.get("message", "")),
        fix=str(problem.get("fix", "")),
    )
