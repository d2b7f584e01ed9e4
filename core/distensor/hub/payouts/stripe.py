"""Payouts as transfers to connected accounts of Stripe.

    send:  look for a transfer of this payout --found--> paid (reversed as a whole: failed)
             | none
           ask for one, under the payout's id as Idempotency-Key --made--> paid
             | refused                              | no answer, busy, broken
           look again, once nothing can be on its    try again after a while, then say "sent":
           way any more --none--> failed             whoever called asks again later

Why money moves at most once. Stripe keeps what became of a key for at least a day, and every transfer carries the
payout's id as its group, for ever. Each attempt looks for the group first. If an earlier one has been carried out by
then, it is found; if it is carried out afterwards, its key is known when ours arrives, and ours changes nothing.

Why a payout that failed does not move money after all. It fails only when Stripe has refused it and `quiet_seconds`
have gone by since the last attempt of which nobody knows what became, a start of this process counting as one; and when
then there is still no transfer. One process at a time may lead a payout.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from distensor.comm.backoff import Backoff
from distensor.core.clock import Clock
from distensor.core.errors import LedgerError, PayoutError
from distensor.hub.ledger.payouts import Payout, PayoutState
from distensor.hub.payouts.http_api import Answer, Api, UnansweredError
from distensor.hub.payouts.rate import Rate

API_BASE = "https://api.stripe.com"
API_VERSION = "2024-06-20"
QUIET_SECONDS = 3600.0
ATTEMPTS = 4
_TRANSFERS = "/v1/transfers"
_NOBODYS_FAULT = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS)
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


class _NotNowError(Exception):
    """Trying again may help."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class _RefusedError(Exception):
    """Stripe has made no transfer, and says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """What Stripe says of one."""

    name: str
    minor: int
    currency: str
    destination: str
    reversed_minor: int

    @property
    def state(self) -> PayoutState:
        return PayoutState.FAILED if self.reversed_minor >= self.minor else PayoutState.PAID


class StripeAdapter:
    """A `PayoutAdapter`. Blocks its thread while it talks and while it waits between attempts.

    Args:
        accounts: the connected account (acct_...) of a node's owner, None where there is none.
        attempts: how often a call tries before it leaves the payout for the next one.
        quiet_seconds: after so long nothing that was sent is on its way any more.
    """

    def __init__(
        self,
        api: Api,
        rate: Rate,
        accounts: Callable[[str], str | None],
        clock: Clock,
        *,
        attempts: int = ATTEMPTS,
        quiet_seconds: float = QUIET_SECONDS,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._rate = rate
        self._accounts = accounts
        self._clock = clock
        self._attempts = attempts
        self._quiet_seconds = quiet_seconds
        self._uniform = uniform
        self._started = clock.monotonic()
        self._unknown: dict[str, float] = {}
        self._why: dict[str, str] = {}

    def why(self, payout_id: str) -> str:
        """What the last call found in the way of a payout; empty where nothing was."""
        return self._why.get(payout_id, "")

    def send(self, payout: Payout) -> PayoutState:
        """Lead a payout as far as it goes now.

        Raises:
            LedgerError: its id or its amount cannot be one of Stripe's; nothing was sent.
            PayoutError: Stripe has a transfer of this payout with another amount or destination, or several.
        """
        minor = self._rate.minor(payout.micro)
        account = self._accounts(payout.node_id)
        return self._persist(_checked(payout.payout_id), lambda: self._lead(payout, minor, account))

    def ask(self, payout_id: str) -> PayoutState:
        """What became of a payout. Moves nothing.

        Raises:
            LedgerError, PayoutError: as `send` does.
        """

        def look() -> PayoutState:
            found = self._find(payout_id)
            return PayoutState.SENT if found is None else found.state

        return self._persist(_checked(payout_id), look)

    def _persist(self, payout_id: str, attempt: Callable[[], PayoutState]) -> PayoutState:
        backoff = Backoff(first=0.5, cap=8.0, uniform=self._uniform)
        for left in reversed(range(self._attempts)):
            try:
                state = attempt()
            except (_NotNowError, UnansweredError) as error:
                self._why[payout_id] = str(error)
                if left:
                    self._clock.sleep(max(backoff.next_delay(), getattr(error, "after", 0.0)))
            else:
                if state is not PayoutState.SENT:
                    self._unknown.pop(payout_id, None)
                if state is PayoutState.PAID:
                    self._why.pop(payout_id, None)
                return state
        return PayoutState.SENT

    def _lead(self, payout: Payout, minor: int, account: str | None) -> PayoutState:
        found = self._find(payout.payout_id)
        if found is not None:
            return _same(payout, found, minor, self._rate.currency, account)
        try:
            if account is None:
                raise _RefusedError(f"node {payout.node_id} has no connected account")
            made = self._make(payout, minor, account)
        except _RefusedError as error:
            self._why[payout.payout_id] = str(error)
            return self._after_refusal(payout, minor, account)
        return _same(payout, made, minor, self._rate.currency, account)

    def _after_refusal(self, payout: Payout, minor: int, account: str | None) -> PayoutState:
        last = self._unknown.get(payout.payout_id, self._started)
        if self._clock.monotonic() - last < self._quiet_seconds:
            return PayoutState.SENT
        found = self._find(payout.payout_id)
        return PayoutState.FAILED if found is None else _same(payout, found, minor, self._rate.currency, account)

    def _find(self, payout_id: str) -> Transfer | None:
        answer = self._api.call("GET", _TRANSFERS, {"transfer_group": payout_id, "limit": 3})
        listed = answer.body.get("data")
        if answer.status != HTTPStatus.OK or not isinstance(listed, list):
            raise _NotNowError(_words(answer, "the list of transfers"), answer.retry_after)
        found = [read_transfer(one, payout_id) for one in listed]
        if len(found) > 1:
            names = ", ".join(one.name for one in found)
            raise PayoutError(
                f"payout {payout_id} has {len(found)} transfers at Stripe ({names}); expected one at most"
            )
        return found[0] if found else None

    def _make(self, payout: Payout, minor: int, account: str) -> Transfer:
        fields: dict[str, str | int] = {
            "amount": minor,
            "currency": self._rate.currency,
            "destination": account,
            "transfer_group": payout.payout_id,
            "metadata[payout]": payout.payout_id,
            "metadata[node]": payout.node_id,
        }
        before, self._unknown[payout.payout_id] = self._unknown.get(payout.payout_id), self._clock.monotonic()
        try:
            answer = self._api.call("POST", _TRANSFERS, fields, key=payout.payout_id)
        finally:
            self._unknown[payout.payout_id] = self._clock.monotonic()
        if answer.status == HTTPStatus.OK:
            return read_transfer(answer.body, payout.payout_id)
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status == HTTPStatus.CONFLICT:  # done, perhaps
            raise _NotNowError(_words(answer, "the transfer"), answer.retry_after)
        self._forget_attempt(payout.payout_id, before)
        if _not_about_this(answer):
            raise _NotNowError(_words(answer, "the transfer"), answer.retry_after)
        raise _RefusedError(_words(answer, "the transfer"))

    def _forget_attempt(self, payout_id: str, before: float | None) -> None:
        """What was certainly not carried out is not on its way."""
        if before is None:
            del self._unknown[payout_id]
        else:
            self._unknown[payout_id] = before


def _checked(payout_id: str) -> str:
    if not _NAME.fullmatch(payout_id):
        raise LedgerError(f"payout {payout_id[:200]!r}: expected 1 to 200 letters, digits, dots, colons or dashes")
    return payout_id


def _not_about_this(answer: Answer) -> bool:
    """Too many calls, a key that Stripe does not take, or another order under the same key: no fault of the payee."""
    error = answer.body.get("error")
    kind = error.get("type") if isinstance(error, dict) else None
    return answer.status in _NOBODYS_FAULT or kind == "idempotency_error" or not isinstance(error, dict)


def read_transfer(body: Any, payout_id: str) -> Transfer:
    """What Stripe says of the transfer of a payout.

    Raises:
        UnansweredError: the words say nothing of one. It may be there all the same, so it is asked for again.
    """
    if not isinstance(body, dict) or body.get("transfer_group") != payout_id:
        raise UnansweredError(f"Stripe answered what is no transfer of payout {payout_id}")
    if any(type(body.get(name)) is not int for name in ("amount", "amount_reversed")) or any(
        not isinstance(body.get(name), str) for name in ("id", "currency", "destination")
    ):
        raise UnansweredError(f"Stripe answered what is no transfer of payout {payout_id}")
    return Transfer(
        name=body["id"][:200],
        minor=body["amount"],
        currency=body["currency"],
        destination=body["destination"],
        reversed_minor=body["amount_reversed"],
    )


def _same(payout: Payout, found: Transfer, minor: int, currency: str, account: str | None) -> PayoutState:
    """The transfer's state, once it is known to be the one that was ordered."""
    if (found.minor, found.currency) != (minor, currency) or found.destination != (account or found.destination):
        raise PayoutError(
            f"payout {payout.payout_id} of {minor} {currency} (smallest units) to {account} is transfer {found.name} "
            f"of {found.minor} {found.currency} to {found.destination} at Stripe"
        )
    return found.state


def _words(answer: Answer, what: str) -> str:
    """What Stripe says is wrong, without its prose, which may quote a key."""
    error: Mapping[str, Any] = answer.body["error"] if isinstance(answer.body.get("error"), dict) else {}
    given = [error.get(name) for name in ("type", "code", "param")]
    known = [text[:100] for text in given if isinstance(text, str) and text]
    return f"Stripe: {what}: status {answer.status}" + (f" ({', '.join(known)})" if known else "")
