"""What every request passes before a route sees it: plain ASGI, so that streams are not collected."""

from __future__ import annotations

import re
import secrets
import traceback
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distensor.cloud import problems
from distensor.cloud.metrics import HttpMeter
from distensor.cloud.settings import LARGEST_BODY, CloudSettings
from distensor.core.clock import Clock

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_HSTS = (b"strict-transport-security", b"max-age=31536000")


def _too_large() -> HTTPException:
    """The framework lets its own kind of error through while it reads a body."""
    return HTTPException(413, f"a body of more than {LARGEST_BODY} bytes")


class Outermost:
    """Gives each request an id, adds headers, counts, and answers defects and what no route should see."""

    def __init__(
        self, app: ASGIApp, settings: CloudSettings, meter: HttpMeter, clock: Clock, log: Callable[[str], None]
    ) -> None:
        self._app = app
        self._hosts = settings.known_hosts
        self._headers = (*_HEADERS, _HSTS) if settings.tls is not None else _HEADERS
        self._meter = meter
        self._clock = clock
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, and no lifespan: the hub begins and ends what there is
        headers = dict(scope["headers"])
        scope["distensor.request_id"] = request_id = _request_id(headers)
        answer = _Answer(send, self._headers, request_id)
        began = self._clock.monotonic()
        try:
            await self._pass_on(scope, headers, receive, answer)
        except Exception:  # noqa: BLE001  # a defect: the caller gets an id, the log gets the rest
            self._log(f"request {request_id}: {traceback.format_exc()}")
            await answer.refuse(500, problems.DEFECT)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._meter.count(scope["method"], route, answer.status, self._clock.monotonic() - began)

    async def _pass_on(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Answer) -> None:
        if host_of(headers.get(b"host", b"")) not in self._hosts:
            await answer.refuse(421, "this API is not reached by this host name; the operator adds it by --http-host")
        elif not headers.get(b"content-length", b"0").isdigit():
            await answer.refuse(400, "Content-Length is no number")
        elif int(headers.get(b"content-length", b"0")[:20]) > LARGEST_BODY:
            await answer.refuse(413, _too_large().detail)
        else:
            await self._app(scope, _limited(receive), answer.send)


class _Answer:
    """What goes out, once."""

    def __init__(self, send: Send, headers: tuple[tuple[bytes, bytes], ...], request_id: str) -> None:
        self._send = send
        self._more = (*headers, (b"x-request-id", request_id.encode()))
        self._request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name.lower() for name, _ in message["headers"]}
            more = [pair for pair in self._more if pair[0] not in own]
            if b"cache-control" not in own:
                more.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*message["headers"], *more]}
        await self._send(message)

    async def refuse(self, status: int, detail: str) -> None:
        """Answer with a problem, if nothing has been answered yet."""
        if self.status:
            return
        body = problems.body_of(status, detail, self._request_id)
        headers = [(b"content-type", problems.MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        headers.append((b"connection", b"close"))  # what is left of the request is not read
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def host_of(header: bytes) -> str:
    """The host of a Host header, in lower case and without port and brackets."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _limited(receive: Receive) -> Receive:
    """A body that came in pieces is counted as it comes."""
    seen = 0

    async def counting() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > LARGEST_BODY:
            raise _too_large()
        return message

    return counting
