"""Ask the running supervisor once, for the commands of this wheel: one blocking conversation on its socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor_server.lines import LineSplitter, Oversize
from distensor_server.localserver import RequestError

LONGEST = 16 << 20
WITHIN_SECONDS = 20.0
"""A login asks the hub, which may take ten seconds to be found silent."""


class NoAnswerError(Exception):
    """Nobody to talk to; `code` as the dashboard names it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The first two messages of a supervisor."""

    hello: Mapping[str, Any]
    sections: Mapping[str, Any]


def look(path: Path, *, within: float = 5.0) -> Snapshot:
    """What the supervisor shows.

    Raises:
        NoAnswerError: none answers there.
    """
    with _connected(path, within) as talk:
        return talk.opening()


def ask(path: Path, method: str, params: Mapping[str, Any], *, within: float = WITHIN_SECONDS) -> Mapping[str, Any]:
    """The result of a method.

    Raises:
        NoAnswerError: none answers there.
        RequestError: it refuses.
    """
    with _connected(path, within) as talk:
        talk.opening()
        return talk.ask(method, params)


class _Talk:
    def __init__(self, connection: socket.socket, path: Path) -> None:
        self._socket, self._path = connection, path
        self._splitter = LineSplitter(LONGEST)
        self._lines: list[bytes] = []

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def opening(self) -> Snapshot:
        hello, snapshot = self._read(), self._read()
        data = snapshot.get("data")
        if hello.get("type") != "hello" or not isinstance(data, dict):
            raise NoAnswerError("not_a_supervisor", f"{self._path} answers, but not as a supervisor")
        return Snapshot(hello=hello, sections=data)

    def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        request = {"type": "request", "id": "1", "method": method, "params": dict(params)}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NoAnswerError("not_running", f"the supervisor at {self._path} is gone") from error
        while (answer := self._read()).get("id") != "1":
            pass
        if answer.get("ok") is True:
            result = answer.get("result")
            return result if isinstance(result, dict) else {}
        error_ = answer.get("error")
        raise RequestError(**{name: str((error_ or {}).get(name, "")) for name in ("code", "message", "fix")})

    def _read(self) -> Mapping[str, Any]:
        while not self._lines:
            try:
                chunk = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise NoAnswerError("silent", f"the supervisor at {self._path} does not answer") from error
            except OSError as error:
                raise NoAnswerError("not_running", f"the supervisor at {self._path} is gone") from error
            if not chunk:
                raise NoAnswerError("not_running", f"the supervisor at {self._path} is gone")
            self._lines += [line for line in self._splitter.feed(chunk) if not isinstance(line, Oversize)]
        try:
            value = json.loads(self._lines.pop(0))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise NoAnswerError("not_a_supervisor", f"{self._path} answers, but not as a supervisor")
        return value


def _connected(path: Path, within: float) -> _Talk:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(within)
    try:
        connection.connect(str(path))
    except PermissionError as error:
        connection.close()
        raise NoAnswerError("not_permitted", f"{path} belongs to another user") from error
    except TimeoutError as error:
        connection.close()
        raise NoAnswerError("silent", f"the supervisor at {path} does not answer") from error
    except OSError as error:
        connection.close()
        raise NoAnswerError("not_running", f"no supervisor answers at {path}") from error
    return _Talk(connection, path)
