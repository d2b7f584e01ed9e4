"""One HTTP call to a payment service: a form goes out, JSON comes back, or nobody knows what became of it."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from distensor.core.clock import Clock
from distensor.core.errors import ConfigError, PayoutError
from distensor.hub.payouts.secret import Secret

MOST_BYTES = 1 << 20
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class UnansweredError(PayoutError):
    """No whole answer came, or one that says nothing: the call may have been carried out, or may yet be, or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """`body` is empty where the answer was not a JSON object."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)
    retry_after: float = 0.0
    """Seconds that the service wants to be left alone."""


class Api(Protocol):
    """What the adapter needs of the wire."""

    def call(self, method: str, path: str, fields: Mapping[str, str | int], *, key: str | None = None) -> Answer:
        """Raises UnansweredError."""


class HttpApi:
    """A fresh connection for each call: there are few, and a connection that is closed carries nothing late.

    Args:
        base: https://host; http only for a service on this machine.
        seconds: of a whole call.

    Raises:
        ConfigError: no such address.
    """

    def __init__(self, base: str, secret: Secret, clock: Clock, *, version: str = "", seconds: float = 30.0) -> None:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ConfigError(f"payment service {base!r}: expected https://host")
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise ConfigError(f"payment service {base!r}: the key would go over the network in the clear; use https")
        self._host, self._port = parts.hostname, parts.port
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._secret, self._clock, self._version, self._seconds = secret, clock, version, seconds

    def call(self, method: str, path: str, fields: Mapping[str, str | int], *, key: str | None = None) -> Answer:
        form = urlencode({name: str(value) for name, value in fields.items()})
        target, body = (path, form.encode()) if method == "POST" else (f"{path}?{form}" if form else path, None)
        until = self._clock.monotonic() + self._seconds
        connection = self._connection()
        try:
            connection.request(method, target, body, self._headers(body, key))
            response = connection.getresponse()
            content = self._content(response, until)
            return read_answer(response.status, content, response.headers.get("Retry-After", "0"))
        except (OSError, http.client.HTTPException) as error:
            # The name of the error alone: its text may quote what was sent.
            raise UnansweredError(f"{method} {path} at {self._host}: no answer ({type(error).__name__})") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=self._tls)

    def _headers(self, body: bytes | None, key: str | None) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {self._secret.reveal()}", "Accept": "application/json"}
        if self._version:
            headers["Stripe-Version"] = self._version
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        if key is not None:
            headers["Idempotency-Key"] = key
        return headers

    def _content(self, response: http.client.HTTPResponse, until: float) -> bytes:
        """The whole body, within its bounds of size and time."""
        content = bytearray()
        while piece := response.read1(65536):
            content += piece
            if len(content) > MOST_BYTES or self._clock.monotonic() > until:
                raise http.client.HTTPException("an answer without end")
        if response.length:
            raise http.client.IncompleteRead(bytes(content), response.length)
        return bytes(content)


def read_answer(status: int, content: bytes, wait: str) -> Answer:
    """What came, as far as it is what it should be. `wait` is Retry-After."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = {}
    try:
        retry_after = float(wait)
    except ValueError:
        retry_after = 0.0
    return Answer(
        status=status,
        body=body if isinstance(body, dict) else {},
        retry_after=min(max(retry_after, 0.0), 60.0) if retry_after == retry_after else 0.0,
    )
