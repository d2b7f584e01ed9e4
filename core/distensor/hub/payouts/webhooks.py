"""What Stripe calls us with: a signed event that says that a transfer has changed.

An event is only a hint. Whoever is told asks Stripe itself what became of the payout, so an event that is late, twice,
out of order or years old changes nothing that is not so; one that is lost is made up for by asking now and then.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distensor.core.clock import Clock
from distensor.core.errors import PayoutError
from distensor.hub.payouts.secret import Secret

TOLERANCE_SECONDS = 300
MOST_BYTES = 1 << 20
_REMEMBERED = 10_000
_MOST_SIGNATURES = 16


class WebhookRefusedError(PayoutError):
    """Not signed with our secret, too old, or no event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """`payout_id` is None where the event is about something else."""

    event_id: str
    kind: str
    payout_id: str | None


def signature(secret: Secret, at: int, payload: bytes) -> str:
    """HMAC-SHA256 of "time.payload" in hex, as in the header's v1."""
    return hmac.new(secret.reveal().encode(), b"%d." % at + payload, hashlib.sha256).hexdigest()


class Webhooks:
    """Checks what comes in. Several secrets while one is being replaced by another."""

    def __init__(self, secrets: Sequence[Secret], clock: Clock, *, tolerance: int = TOLERANCE_SECONDS) -> None:
        self._secrets = tuple(secrets)
        self._clock = clock
        self._tolerance = tolerance
        self._seen: OrderedDict[str, None] = OrderedDict()

    def read_event(self, payload: bytes, header: str) -> Event | None:
        """The event of a call, None where it has come before.

        Args:
            payload: the body as it came, byte by byte.
            header: Stripe-Signature.

        Raises:
            WebhookRefusedError: answer with status 400; the reason names nothing of the payload.
        """
        if len(payload) > MOST_BYTES:
            raise WebhookRefusedError(f"an event of {len(payload)} bytes; expected {MOST_BYTES} at most")
        self._check(payload, header)
        event = _event(payload)
        if event.event_id in self._seen:
            return None
        self._seen[event.event_id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return event

    def forget(self, event: Event) -> None:
        """What it hints at could not be looked into: it counts again when it is sent again."""
        self._seen.pop(event.event_id, None)

    def _check(self, payload: bytes, header: str) -> None:
        at, given = _fields(header)
        matches = False
        for secret in self._secrets:
            right = signature(secret, at, payload)
            for one in given:
                matches |= hmac.compare_digest(right.encode(), one.encode())
        if not matches:
            raise WebhookRefusedError("the signature is not made with the secret of this endpoint")
        if abs(self._clock.now() - at) > self._tolerance:
            raise WebhookRefusedError(f"the event was signed more than {self._tolerance} s ago, or in the future")


def _fields(header: str) -> tuple[int, list[str]]:
    """The time and the signatures of version 1; others are ignored."""
    times: list[str] = []
    given: list[str] = []
    for part in header[:4096].split(","):
        name, _, value = part.strip().partition("=")
        if name == "t":
            times.append(value)
        elif name == "v1" and value.isascii():
            given.append(value)
    if len(times) != 1 or not times[0].isascii() or not times[0].isdigit() or len(times[0]) > 12:
        raise WebhookRefusedError("Stripe-Signature has no time; expected t=SECONDS,v1=SIGNATURE")
    if not 1 <= len(given) <= _MOST_SIGNATURES:
        raise WebhookRefusedError(f"Stripe-Signature has {len(given)} signatures v1; expected 1 to {_MOST_SIGNATURES}")
    return int(times[0]), given


def _event(payload: bytes) -> Event:
    try:
        body: Any = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise WebhookRefusedError("the event is not JSON") from error
    if not isinstance(body, dict) or not all(isinstance(body.get(name), str) for name in ("id", "type")):
        raise WebhookRefusedError("the event has no id or no type")
    return Event(event_id=body["id"][:200], kind=body["type"][:200], payout_id=_payout_of(body))


def _payout_of(body: dict[str, Any]) -> str | None:
    data = body.get("data")
    what = data.get("object") if isinstance(data, dict) else None
    if not body["type"].startswith("transfer.") or not isinstance(what, dict):
        return None
    group = what.get("transfer_group")
    return group if isinstance(group, str) and 0 < len(group) <= 200 else None
