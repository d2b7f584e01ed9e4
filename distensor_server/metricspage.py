"""The Prometheus page: plain HTTP on a loopback port, only when the owner sets `metrics_port`.

Only GET and HEAD of /metrics, one request a connection, and only for a Host that is this machine's loopback: a web page
in the owner's browser must not read it through a name of its own that resolves to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distensor_server.config import Limits
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.metrics import CONTENT_TYPE, exposition
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.sections import Section

ADDRESS = "127.0.0.1"
LARGEST_REQUEST = 8192
READ_SECONDS = 3.0
RETRY_SECONDS = 30.0
MOST_CLIENTS = 16
_LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    status: str
    body: str
    more: tuple[str, ...] = ()

    def encode(self, *, head: bool = False) -> bytes:
        body = self.body.encode("utf-8", "backslashreplace")
        kind = CONTENT_TYPE if self.status.startswith("200") else "text/plain; charset=utf-8"
        lines = [f"HTTP/1.1 {self.status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        lines += ["Connection: close", "Cache-Control: no-store", "X-Content-Type-Options: nosniff", *self.more]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if head else body)


def answer(request: bytes, page: Callable[[], str]) -> bytes:
    """The response to one request, whatever its bytes are. Pure but for `page`."""
    try:
        first, *fields = request.decode("ascii").split("\r\n\r\n", 1)[0].split("\r\n")
        method, target, version = first.split(" ")
        headers = [line.split(":", 1) for line in fields]
        hosts = [value.strip() for name, value in headers if name.lower() == "host"]
    except ValueError:
        return Response(status="400 Bad Request", body="not an HTTP request\n").encode()
    if not version.startswith("HTTP/1.") or len(hosts) != 1 or not _is_local(hosts[0]):
        return Response(status="403 Forbidden", body="ask for localhost\n").encode()
    if target.partition("?")[0] != "/metrics":
        return Response(status="404 Not Found", body="only /metrics is here\n").encode()
    if method not in ("GET", "HEAD"):
        refusal = Response(status="405 Method Not Allowed", body="only GET\n", more=("Allow: GET, HEAD",))
        return refusal.encode()
    return Response(status="200 OK", body=page()).encode(head=method == "HEAD")


def _is_local(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host.lower() in _LOCAL_NAMES
    return name.lower() in _LOCAL_NAMES and port.isdigit()


class MetricsPage(Feature):
    """Listens while `metrics_port` is set; follows it when the settings are read again."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = asyncio.Event()
        self._clients = 0
        self.address: str | None = None
        self._error: str | None = None

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"metrics": self._section}

    def _section(self, _picture: Picture) -> Section:
        return {"enabled": self._node.limits.metrics_port > 0, "address": self.address, "error": self._error}

    def on_limits(self, limits: Limits) -> None:
        self._changed.set()

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._run(),)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            port = self._node.limits.metrics_port
            server = await self._listen(port) if port else None
            try:
                await self._until_changed(port, retry=server is None and port > 0)
            finally:
                self.address = None
                if server is not None:
                    server.close()

    async def _listen(self, port: int) -> asyncio.Server | None:
        try:
            server = await asyncio.start_server(self._serve, ADDRESS, port, limit=LARGEST_REQUEST)
        except OSError as error:
            self._error = f"cannot listen at {ADDRESS}:{port}: {error.strerror or error}; set another metrics_port"
            self._node.journal.add("warning", "metrics", self._error)
            return None
        self._error, self.address = None, f"http://{ADDRESS}:{server.sockets[0].getsockname()[1]}/metrics"
        self._node.journal.add("info", "metrics", f"metrics at {self.address}")
        return server

    async def _until_changed(self, port: int, *, retry: bool) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS if retry else None)
            self._changed.clear()
            if retry or self._node.limits.metrics_port != port:
                return

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= MOST_CLIENTS:
                await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that is slow, too long or gone gets no answer
        finally:
            self._clients -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(READ_SECONDS):
            request = await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(request, lambda: exposition(self._node.sections())))
            await writer.drain()
