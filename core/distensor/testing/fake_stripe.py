"""A payment service on a real socket that behaves like Stripe's transfers, and badly where it is told to.

What it keeps of Stripe: transfers by group, keys of idempotency with the answer of their first request (a server's
error included), forgotten after a day; refusals that leave no trace under a key; signed events.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from distensor.core.clock import Clock
from distensor.hub.payouts.secret import Secret
from distensor.hub.payouts.webhooks import signature

KEY_SECONDS = 86_400.0


class Mishap(StrEnum):
    """What becomes of one request."""

    NONE = "none"
    NEVER_CAME = "never came"
    """The connection ends, and nothing was done."""
    LOST_ANSWER = "lost answer"
    """It was done, and the connection ends."""
    LATE = "late"
    """The connection ends, and it is done when `arrive` is called."""
    BROKEN_BEFORE = "broken before"
    """Status 500 that stays under the key; nothing was done."""
    BROKEN_AFTER = "broken after"
    """It was done, and the answer is status 500, and stays that."""
    BUSY = "busy"
    IN_USE = "in use"
    TWICE = "twice"
    """The network brings the request twice; the second answer is the one that comes back."""
    CUT_SHORT = "cut short"
    """It was done, and half of the answer comes back."""
    NONSENSE = "nonsense"
    """It was done, and the answer is no JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    status: int
    body: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class _Kept:
    fields: Mapping[str, str]
    reply: Reply
    until: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A call of a webhook that is to be made: the body and its signature."""

    payload: bytes
    header: str


@dataclass(kw_only=True)
class FakeStripe:
    """Use as a context manager; `base` is its address.

    `enabled` are accounts that can be paid, `balance` is what there is to pay with, in smallest units.
    """

    clock: Clock
    secret: str = "sk_test_fake"  # noqa: S105  # of nothing
    webhook_secret: Secret = field(default_factory=lambda: Secret("whsec_fake"))
    enabled: set[str] = field(default_factory=set)
    balance: int = 10**12
    mishaps: deque[Mishap] = field(default_factory=deque)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, key of idempotency) of all that came."""

    def __post_init__(self) -> None:
        self._keys: dict[str, _Kept] = {}
        self._late: list[tuple[str, dict[str, str]]] = []
        self._lock = threading.RLock()
        self._events = 0
        fake = self

        class Handler(_Handler):
            stripe = fake

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for them
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeStripe:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def paid(self, payout_id: str) -> list[dict[str, Any]]:
        """Transfers of a payout."""
        return [one for one in self.transfers if one["transfer_group"] == payout_id]

    def arrive(self) -> None:
        """What was on its way arrives."""
        with self._lock:
            late, self._late = self._late, []
            for key, fields in late:
                self.create(key, fields)

    def reverse(self, payout_id: str) -> None:
        """All of a transfer goes back to the platform."""
        with self._lock:
            (one,) = self.paid(payout_id)
            one.update(amount_reversed=one["amount"], reversed=True)
            self.balance += one["amount"]
            self._tell("transfer.reversed", one)

    def create(self, key: str, fields: dict[str, str], *, broken: bool | None = None) -> Reply:
        """A request for a transfer. `broken`: with a 500, before (False) or after (True) doing it."""
        with self._lock:
            kept = self._keys.get(key)
            if kept is not None and kept.until > self.clock.monotonic():
                if kept.fields != fields:
                    return _refusal(400, "idempotency_error", "")
                return kept.reply
            if fields.get("destination") not in self.enabled:
                return _refusal(400, "invalid_request_error", "insufficient_capabilities_for_transfer")
            reply = self._carry_out(fields) if broken is not False else _refusal(500, "api_error", "")
            if broken:
                reply = _refusal(500, "api_error", "")
            self._keys[key] = _Kept(fields=fields, reply=reply, until=self.clock.monotonic() + KEY_SECONDS)
            return reply

    def _carry_out(self, fields: dict[str, str]) -> Reply:
        amount = int(fields["amount"])
        if amount > self.balance:
            return _refusal(400, "invalid_request_error", "balance_insufficient")
        self.balance -= amount
        transfer = {
            "id": f"tr_{len(self.transfers) + 1}",
            "object": "transfer",
            "amount": amount,
            "amount_reversed": 0,
            "reversed": False,
            "currency": fields["currency"],
            "destination": fields["destination"],
            "transfer_group": fields["transfer_group"],
            "metadata": {"payout": fields["metadata[payout]"], "node": fields["metadata[node]"]},
        }
        self.transfers.append(transfer)
        self._tell("transfer.created", transfer)
        return Reply(status=200, body=dict(transfer))

    def _tell(self, kind: str, what: dict[str, Any]) -> None:
        self._events += 1
        event = {"id": f"evt_{self._events}", "object": "event", "type": kind, "data": {"object": dict(what)}}
        self.deliveries.append(self.signed(json.dumps(event).encode()))

    def signed(self, payload: bytes, secret: Secret | None = None) -> Delivery:
        """As Stripe would send it now."""
        at = int(self.clock.now())
        return Delivery(
            payload=payload, header=f"t={at},v1={signature(secret or self.webhook_secret, at, payload)},v0=00"
        )

    def take(self, method: str, path: str, key: str, fields: dict[str, str]) -> tuple[Mishap, Reply]:
        """One request and what becomes of it."""
        with self._lock:
            self.requests.append((method, key))
            mishap = self.mishaps.popleft() if self.mishaps else Mishap.NONE
            if path != "/v1/transfers":
                return Mishap.NONE, _refusal(404, "invalid_request_error", "resource_missing")
            if mishap is Mishap.BUSY:
                return mishap, _refusal(429, "rate_limit_error", "rate_limit")
            if method == "GET":
                found = [dict(one) for one in self.paid(fields["transfer_group"])]
                failed = mishap in (Mishap.BROKEN_BEFORE, Mishap.BROKEN_AFTER)
                return mishap, _refusal(500, "api_error", "") if failed else Reply(status=200, body=_listed(found))
            return mishap, self._create(mishap, key, fields)

    def _create(self, mishap: Mishap, key: str, fields: dict[str, str]) -> Reply:
        if mishap is Mishap.IN_USE:
            return _refusal(409, "idempotency_error", "idempotency_key_in_use")
        if mishap is Mishap.LATE:
            self._late.append((key, fields))
        if mishap in (Mishap.LATE, Mishap.NEVER_CAME):
            return _refusal(500, "api_error", "")  # nobody sees it
        if mishap is Mishap.TWICE:
            self.create(key, fields)
        broken = {Mishap.BROKEN_BEFORE: False, Mishap.BROKEN_AFTER: True}.get(mishap)
        return self.create(key, fields, broken=broken)


def _listed(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": found, "has_more": False}


def _refusal(status: int, kind: str, code: str) -> Reply:
    message = "No such key: sk_test_fake"  # a service that quotes secrets
    return Reply(status=status, body={"error": {"type": kind, "code": code, "message": message}})


_NO_ANSWER = (Mishap.NEVER_CAME, Mishap.LOST_ANSWER, Mishap.LATE)


class _Handler(BaseHTTPRequestHandler):
    stripe: FakeStripe
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET", urlsplit(self.path).query)

    def do_POST(self) -> None:
        self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode())

    def _answer(self, method: str, form: str) -> None:
        fields = {name: values[0] for name, values in parse_qs(form, strict_parsing=bool(form)).items()}
        if self.headers.get("Authorization") != f"Bearer {self.stripe.secret}":
            mishap, reply = Mishap.NONE, _refusal(401, "invalid_request_error", "")
        else:
            key = self.headers.get("Idempotency-Key", "")
            mishap, reply = self.stripe.take(method, urlsplit(self.path).path, key, fields)
        self.close_connection = True
        if mishap in _NO_ANSWER:
            return
        content = b"<html>" if mishap is Mishap.NONSENSE else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if reply.status == 429:
            self.send_header("Retry-After", "2")
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if mishap is Mishap.CUT_SHORT else content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it
        """Nothing: a test says what it saw."""
