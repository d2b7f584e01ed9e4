"""The local socket: hello, snapshot, deltas, and requests. JSON lines, schema version 1, mode 0600."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from distensor.core.errors import SessionError, StoreError
from distensor_server.lines import LineSplitter, Oversize
from distensor_server.messages import encode_line
from distensor_server.sections import SCHEMA_VERSION, Sections, changed_sections
from distensor_server.statedir import remove

MAX_REQUEST = 64 * 1024
MAX_PATH = 100
"""Bytes. Linux takes 107 and macOS 103; a round number below both is easier to say."""
BEHIND_BYTES = 1 << 20
"""A client that reads slower than news comes gets no deltas until it has caught up, then a snapshot."""
ANSWER_SECONDS = 1.0

log = logging.getLogger("distensor_server")


class RequestError(Exception):
    """A request that is answered with ok=false. It never leaves this protocol, so it is not in the tree of errors."""

    def __init__(self, *, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix


Method: TypeAlias = Callable[[Mapping[str, Any]], "Mapping[str, Any] | Awaitable[Mapping[str, Any]]"]
"""Parameters in, result out, at once or, where it takes time, by a coroutine. Raises RequestError to refuse."""
Methods: TypeAlias = Mapping[str, Method]
Answer: TypeAlias = dict[str, Any]


class LocalServer:
    """Serves one path. `sections` gives the present state; `publish` sends what changed to every client."""

    def __init__(
        self, path: Path, *, hello: Mapping[str, Any], sections: Callable[[], Sections], methods: Methods
    ) -> None:
        self.path = path
        self._hello = {"type": "hello", "schema_version": SCHEMA_VERSION, **hello}
        self._sections = sections
        self._methods = {**methods, "ping": lambda _params: {}, "snapshot": self._snapshot_result}
        self._clients: set[_Client] = set()
        self._late: set[asyncio.Future[None]] = set()
        self._server: asyncio.AbstractServer | None = None
        self._inode: int | None = None

    @property
    def watched(self) -> bool:
        """Somebody looks: news has to be computed."""
        return bool(self._clients)

    async def start(self) -> None:
        """Bind and listen.

        Raises:
            StoreError: the path is too long, taken by something else, or cannot be created.
            SessionError: another supervisor answers at the path.
        """
        check_path(self.path)
        await _clear_stale(self.path)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            listener = _bind_private(self.path)
        except OSError as error:
            raise StoreError(f"cannot listen at {self.path}: {error.strerror}; give another by --socket") from error
        self._inode = self.path.stat().st_ino
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Client(self), sock=listener)

    def publish(self) -> None:
        if self._clients:
            sections = self._sections()
            for client in list(self._clients):
                client.send_news(sections)

    async def close(self) -> None:
        """Remove the socket file, unless it is somebody else's by now, and end every client."""
        if self._server is None:
            return
        self._server.close()
        for task in self._late:
            task.cancel()
        for client in list(self._clients):
            client.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def add(self, client: _Client) -> None:
        self._clients.add(client)
        client.send(self._hello)
        client.send_snapshot(self._sections())

    def discard(self, client: _Client) -> None:
        self._clients.discard(client)

    def answer(self, line: bytes, send: Callable[[Answer], None]) -> None:
        """Answer one request line by `send`: at once, or later where the method takes time."""
        identity: str | None = None
        try:
            request = _parse_request(line)
            identity = request["id"]
            result = self._method(request["method"])(request["params"])
        except RequestError as error:
            send(_refused(identity, error))
            return
        if isinstance(result, Mapping):
            send(_answered(identity, result))
            return
        task = asyncio.ensure_future(_answer_later(identity, result, send))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def _method(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            names = ", ".join(sorted(self._methods))
            raise RequestError(code="unknown_method", message=f"no method {name!r:.60}", fix=f"use one of {names}")
        return method

    def _snapshot_result(self, _params: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"data": self._sections()}


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._splitter = LineSplitter(MAX_REQUEST)
        self._transport: asyncio.WriteTransport | None = None
        self._sent: Sections = {}
        self._sequence = 0
        self._behind = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.set_write_buffer_limits(high=BEHIND_BYTES)
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.discard(self)

    def pause_writing(self) -> None:
        self._behind = True

    def resume_writing(self) -> None:
        self._behind = False
        self._sent = {}

    def data_received(self, data: bytes) -> None:
        for line in self._splitter.feed(data):
            if self._transport is None or self._transport.is_closing():
                return
            if isinstance(line, Oversize):
                self._refuse_oversize(line)
            elif line.strip():
                self._server.answer(line, self.send)

    def send_news(self, sections: Sections) -> None:
        if self._behind:
            return
        if not self._sent:
            self.send_snapshot(sections)
        elif changed := changed_sections(self._sent, sections):
            self._remember(sections)
            self.send({"type": "delta", "seq": self._sequence, "data": changed})

    def send_snapshot(self, sections: Sections) -> None:
        self._remember(sections)
        self.send({"type": "snapshot", "seq": self._sequence, "data": sections})

    def send(self, message: Mapping[str, Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_line(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _remember(self, sections: Sections) -> None:
        self._sent = sections
        self._sequence += 1

    def _refuse_oversize(self, line: Oversize) -> None:
        message = f"a line of over {line.limit} bytes"
        error = {"code": "too_long", "message": message, "fix": "send shorter requests"}
        self.send({"type": "response", "id": None, "ok": False, "error": error})
        self.close()


def _answered(identity: str | None, result: Mapping[str, Any]) -> Answer:
    return {"type": "response", "id": identity, "ok": True, "result": dict(result)}


def _refused(identity: str | None, error: RequestError) -> Answer:
    details = {"code": error.code, "message": error.message, "fix": error.fix}
    return {"type": "response", "id": identity, "ok": False, "error": details}


async def _answer_later(
    identity: str | None, result: Awaitable[Mapping[str, Any]], send: Callable[[Answer], None]
) -> None:
    try:
        send(_answered(identity, await result))
    except RequestError as error:
        send(_refused(identity, error))
    except Exception:  # a bug in one method: who asked must not wait for ever, and everybody else goes on
        log.exception("a method of the local protocol failed")
        send(_refused(identity, RequestError(code="internal", message="the request failed inside; see the log")))


def _parse_request(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(code="bad_request", message="not a JSON object", fix="send one request a line") from error
    if not isinstance(value, dict) or value.get("type") != "request":
        raise RequestError(code="bad_request", message="expected an object of type 'request'")
    identity, method, params = value.get("id"), value.get("method"), value.get("params", {})
    if not isinstance(identity, str) or not isinstance(method, str) or not isinstance(params, dict):
        raise RequestError(
            code="bad_request", message="a request has text as 'id' and 'method', and an object as 'params'"
        )
    return {"id": identity, "method": method, "params": params}


def check_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise StoreError(
            f"the socket path {path} has {length} bytes and the system takes about {MAX_PATH}; "
            "give a shorter one by --socket or DISTENSOR_SOCKET"
        )


async def _clear_stale(path: Path) -> None:
    """Remove a socket file that nobody answers at: its supervisor was killed."""
    if not _is_socket(path):
        return
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(path), ANSWER_SECONDS)
    except (ConnectionRefusedError, FileNotFoundError):
        remove(path)
        return
    except OSError as error:
        # TimeoutError is an OSError: a supervisor with a full backlog, or one that is stopped, is there all the same.
        raise SessionError(f"something that does not answer holds {path}: {error}; end it, or use --socket") from error
    writer.close()
    raise SessionError(f"another supervisor answers at {path}; stop that one first, or give this one its own --socket")


def _is_socket(path: Path) -> bool:
    """False when nothing is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"cannot look at {path}: {error.strerror}; give another by --socket") from error
    if not stat.S_ISSOCK(mode):
        raise StoreError(f"{path} exists and is no socket; remove it, or give another path by --socket")
    return True


def _bind_private(path: Path) -> socket.socket:
    """The file gets its mode while it is made, so that nobody can connect in between."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(16)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
