"""`distensor hub pay FILE`: pay what is payable through Stripe, once or every few minutes, beside a hub or without one.

Only payouts that this command began are sent: their ids begin with `st_`. Those made by hand stay the operator's.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from distensor.core.clock import Clock
from distensor.core.commandline import UsageParser, stop_when_told
from distensor.core.errors import ConfigError, PayoutError, StoreError
from distensor.core.money import credits_text
from distensor.hub import cashier
from distensor.hub.administration import Clerk
from distensor.hub.audit import OPERATOR
from distensor.hub.ledger.accounts import Ledger, payable
from distensor.hub.ledger.payouts import Payout, PayoutState
from distensor.hub.ledger_queries import PayoutStanding, payouts
from distensor.hub.payouts.driving import PayoutDesk
from distensor.hub.payouts.http_api import HttpApi
from distensor.hub.payouts.rate import Rate
from distensor.hub.payouts.secret import KEY_VARIABLE, find_secret
from distensor.hub.payouts.stripe import API_BASE, API_VERSION, StripeAdapter
from distensor.hub.repository import Books, Store

T = TypeVar("T")

OURS = "st_"
LOCK = "payouts.lock"
_KEYS = {"currency": str, "micro_per_minor": int, "least_minor": int, "key_file": str, "base": str, "accounts": dict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the file says: a rate, where the key is, and the connected account of each node."""

    rate: Rate
    key_file: Path | None
    base: str
    accounts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """What became of one payout in a turn."""

    payout_id: str
    node_id: str
    micro: int
    state: str
    why: str


def arguments(argv: Sequence[str], common: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """Read a command line that begins with `pay`."""
    parser = UsageParser(prog="distensor hub pay", description="Pay what is payable through Stripe.")
    common(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML: currency, micro_per_minor, [accounts] and more")
    parser.add_argument(
        "--every", type=_seconds, metavar="SECONDS", help="again and again, until it is told to stop (60 to 86400)"
    )
    return parser.parse_args(argv[1:])


def _seconds(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 60 <= int(text[:9]) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole seconds from 60 to 86400")
    return int(text)


def read_settings(path: Path) -> Settings:
    """Raises: ConfigError: the file cannot be read, is not TOML, or says something else than it should."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"payout file {path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or no text
        raise ConfigError(f"payout file {path}: {error}") from error
    for key, value in values.items():
        if key not in _KEYS or type(value) is not _KEYS[key]:
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in _KEYS.items())
            raise ConfigError(f"payout file {path}: {key[:70]!r} is {type(value).__name__}; expected {expected}")
    accounts = values.get("accounts", {})
    if not accounts or not all(isinstance(one, str) and one.startswith("acct_") for one in accounts.values()):
        raise ConfigError(f"payout file {path}: [accounts] has no line NODE = 'acct_...', or one that is not so")
    missing = sorted({"currency", "micro_per_minor"} - values.keys())
    if missing:
        raise ConfigError(f"payout file {path}: {missing[0]} is missing")
    key_file = values.get("key_file")
    return Settings(
        rate=Rate(**{key: values[key] for key in ("currency", "micro_per_minor", "least_minor") if key in values}),
        key_file=None if key_file is None else path.parent / key_file,
        base=values.get("base", API_BASE),
        accounts=accounts,
    )


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Raises: StoreError: another process pays for this hub now."""
    with (state / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"state directory {state}: another `distensor hub pay` runs on it") from error
        yield


class Payer:
    """Makes payouts of what is payable, and leads all that it made."""

    def __init__(self, store: Store, settings: Settings, adapter: StripeAdapter, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._adapter = adapter
        self._clock = clock
        self._desk = PayoutDesk(self._enter, adapter)

    def turn(self) -> list[Paid]:
        """All nodes of the file, once.

        Raises:
            StoreError: the books cannot be written.
        """
        with self._store.transaction() as books:
            open_ = self._begin(books)
        return [self._lead(payout) for payout in open_]

    def _begin(self, books: Books) -> list[Payout]:
        """Those that are on their way, and new ones for nodes that have none."""
        ours = [one for one in payouts(books) if one.payout_id.startswith(OURS)]
        waiting = [one for one in ours if one.standing is PayoutStanding.CLEARING]
        busy = {one.node_id for one in waiting}
        for node in sorted(self._settings.accounts.keys() - busy):
            part = self._settings.rate.payable_part(books.balance(payable(node)))
            if part:
                waiting += cashier.make_payouts(books, self._clerk(), node, part, OURS + uuid.uuid4().hex[:20])
        return [Payout(payout_id=one.payout_id, node_id=one.node_id, micro=one.micro) for one in waiting]

    def _lead(self, payout: Payout) -> Paid:
        try:
            state, why = self._desk.lead(payout, at=int(self._clock.now())), self._adapter.why(payout.payout_id)
        except PayoutError as error:  # of this payout alone; a person has to look at it
            state, why = PayoutState.SENT, str(error)
        if state is not PayoutState.SENT:
            with self._store.transaction() as books:
                self._clerk().write(books, f"payout {state.value}", payout.payout_id, why)
        return Paid(payout_id=payout.payout_id, node_id=payout.node_id, micro=payout.micro, state=state.value, why=why)

    def _enter(self, run: Callable[[Ledger], T]) -> T:
        with self._store.transaction() as books:
            return run(Ledger(books=books, policy=books.policy()))

    def _clerk(self) -> Clerk:
        return Clerk(actor=OPERATOR, now=int(self._clock.now()))


def run(
    options: argparse.Namespace, open_books: Callable[[], Store], clock: Clock, environment: Mapping[str, str]
) -> None:
    """Pay, and print what became of each payout.

    Raises:
        ConfigError, StoreError: the file, the key or the books are not as they should be.
    """
    settings = read_settings(options.file)
    api = HttpApi(settings.base, find_secret(KEY_VARIABLE, environment, settings.key_file), clock, version=API_VERSION)
    with alone(options.state), closing(open_books()) as store:
        payer = Payer(store, settings, StripeAdapter(api, settings.rate, settings.accounts.get, clock), clock)
        if options.every is None:
            _show(payer.turn(), options)
        else:
            asyncio.run(_again(payer, options))


async def _again(payer: Payer, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_when_told(stop, with_stdin=False)
    while not stop.is_set():
        _show(await asyncio.to_thread(payer.turn), options)
        try:
            await asyncio.wait_for(stop.wait(), options.every)
        except TimeoutError:
            continue


def _show(paid: Sequence[Paid], options: argparse.Namespace) -> None:
    if options.json:
        values: dict[str, Any] = {"v": 1, "payouts": [asdict(one) for one in paid]}
        print(json.dumps(values), flush=True)
        return
    for one in paid:
        why = f": {one.why}" if one.why else ""
        print(f"{one.payout_id} {one.node_id} {credits_text(one.micro)} credits {one.state}{why}", flush=True)
    if not paid:
        print("Nothing to pay.", flush=True)
