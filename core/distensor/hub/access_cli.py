"""`distensor hub account`, `key` and `audit`: the operator's work on the books of a hub, running or not.

Keys are printed once, on standard output, and are never taken from the command line: where one is asked for, `-` reads
it from standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from distensor.comm.keys import KeyKind, decode_key
from distensor.comm.tokens import Role
from distensor.core.commandline import UsageParser
from distensor.core.errors import AuthenticationError, ConfigError
from distensor.core.ids import AccountId
from distensor.core.table import table
from distensor.hub import administration
from distensor.hub.accounts import Account, KeyRecord, Minted, Quota, ended
from distensor.hub.administration import Clerk
from distensor.hub.audit import OPERATOR, AuditEntry
from distensor.hub.authorization import Scope
from distensor.hub.hashing import hash_secret
from distensor.hub.place import Place
from distensor.hub.repository import Books

DAY = 86_400
LONGEST_KEY = 4096
VERBS = ("account", "key", "audit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """What a command works with."""

    books: Books
    options: argparse.Namespace
    now: int
    place: Place

    @property
    def clerk(self) -> Clerk:
        return Clerk(actor=OPERATOR, now=self.now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a command prints: values for `--json`, and lines for people."""

    values: dict[str, Any]
    text: str


Run: TypeAlias = Callable[[Desk], Report]
Common: TypeAlias = Callable[[argparse.ArgumentParser], None]


def parser(verb: str, common: Common) -> argparse.ArgumentParser:
    """The parser of one of VERBS; `common` adds the options that say where the books are. Its results have `run`."""
    return {"account": _account_parser, "key": _key_parser, "audit": _audit_parser}[verb](common)


def _command(commands: Any, common: Common, name: str, about: str, run: Run) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    common(command)
    command.set_defaults(run=run)
    return command


def _account_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub account", description="Who may use the hub.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add = _command(commands, common, "add", "Make an account.", _add)
    add.add_argument("name")
    for kind, about in _KINDS.items():
        add.add_argument(f"--{kind.value}", dest="kinds", action="append_const", const=kind, help=about)
    _command(commands, common, "list", "Show all accounts.", _accounts)
    for word, run in (("disable", _disable), ("enable", _enable)):
        command = _command(commands, common, word, f"{word.capitalize()} an account with all its keys and nodes.", run)
        command.add_argument("name")
    limit = _command(commands, common, "limit", "Set what the jobs of an account may take together.", _limit)
    limit.add_argument("name")
    limit.add_argument("--workers", type=_limit_of, metavar="N", help="of jobs that are placed or run; none: no limit")
    limit.add_argument("--waiting", type=_limit_of, metavar="N", help="jobs in the queue; none: no limit")
    limit.add_argument("--priority", type=_whole, metavar="N", help="the highest that a job may ask for")
    return top


_KINDS = {
    KeyKind.PROVIDER: "it lends machines",
    KeyKind.TRAINER: "it trains",
    KeyKind.ADMIN: "it looks after the hub",
}


def _key_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub key", description="Keys of accounts; each is printed once.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    create = _command(commands, common, "create", "Make a key and print it.", _create)
    create.add_argument("account")
    create.add_argument("--kind", type=KeyKind, choices=list(KeyKind), required=True, metavar="|".join(KeyKind))
    create.add_argument("--scope", dest="scopes", type=Scope, choices=list(Scope), action="append", metavar="SCOPE")
    create.add_argument("--label", default="", help="a note for lists")
    create.add_argument("--days", type=_whole, metavar="N", help="after how many days it ends (never)")
    show = _command(commands, common, "list", "Show keys, without what is secret of them.", _keys)
    show.add_argument("account", nargs="?")
    rotate = _command(commands, common, "rotate", "Make a key that takes the place of another.", _rotate)
    rotate.add_argument("key", help="its id")
    rotate.add_argument("--hours", type=_whole, default=24, metavar="N", help="how long the old one is still good (24)")
    revoke = _command(commands, common, "revoke", "End a key, and whatever is open by it.", _revoke)
    revoke.add_argument("key", help="its id; - reads the key itself from standard input")
    return top


def _audit_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub audit", description="What was changed and what was refused, newest first.")
    common(top)
    top.add_argument("-n", dest="most", type=_whole, default=50, metavar="N", help="how many lines (50)")
    top.add_argument("--before", type=_whole, metavar="NUMBER", help="only lines older than this one")
    top.set_defaults(run=_audit)
    return top


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 to 999999")
    return int(text)


def _limit_of(text: str) -> int:
    """-1 is no limit."""
    return -1 if text == "none" else _whole(text)


def execute(desk: Desk) -> str:
    """Run the command of `desk.options`; what to print.

    Raises:
        ConfigError: the books do not allow it; nothing was changed.
    """
    report: Report = desk.options.run(desk)
    return json.dumps({"v": 1, **report.values}) if desk.options.json else report.text


# Accounts


def _add(desk: Desk) -> Report:
    kinds = frozenset(desk.options.kinds or ())
    if not kinds:
        raise ConfigError("say what the account is for: --provider, --trainer, --admin, or more than one of them")
    account = administration.add_account(desk.books, desk.clerk, desk.options.name, kinds)
    more = f"It has no keys yet: distensor hub key create {account.account_id} --kind {sorted(kinds)[0]}"
    return Report(values={"account": _account_values(account)}, text=f"Account {account.account_id} is made. {more}")


def _accounts(desk: Desk) -> Report:
    accounts = desk.books.accounts()
    rows = [
        (
            one.account_id,
            ", ".join(sorted(one.kinds)),
            _day(one.created_at),
            one.quota,
            "disabled" if one.disabled else "",
        )
        for one in accounts
    ]
    text = table(("account", "may have keys as", "since", "limits of its jobs", ""), rows)
    return Report(values={"accounts": [_account_values(one) for one in accounts]}, text=text)


def _disable(desk: Desk) -> Report:
    account = administration.set_disabled(desk.books, desk.clerk, desk.options.name, disabled=True)
    text = f"Account {account.account_id} is disabled. A running hub ends what is open by it within a second."
    return Report(values={"account": _account_values(account)}, text=text)


def _enable(desk: Desk) -> Report:
    account = administration.set_disabled(desk.books, desk.clerk, desk.options.name, disabled=False)
    return Report(values={"account": _account_values(account)}, text=f"Account {account.account_id} is enabled.")


def _limit(desk: Desk) -> Report:
    given, before = desk.options, administration.account_of(desk.books, desk.options.name).quota

    def chosen(word: int | None, old: int | None) -> int | None:
        return old if word is None else None if word < 0 else word

    quota = Quota(
        workers=chosen(given.workers, before.workers),
        waiting=chosen(given.waiting, before.waiting),
        priority=before.priority if given.priority is None else given.priority,
    )
    account = administration.set_quota(desk.books, desk.clerk, given.name, quota)
    return Report(values={"account": _account_values(account)}, text=f"Account {given.name}: {quota}.")


def _account_values(account: Account) -> dict[str, Any]:
    return {
        "account": account.account_id,
        "kinds": sorted(account.kinds),
        "created_at": account.created_at,
        "disabled": account.disabled,
        "limits": {
            "workers": account.quota.workers,
            "waiting": account.quota.waiting,
            "priority": account.quota.priority,
        },
    }


# Keys


def _create(desk: Desk) -> Report:
    options = desk.options
    minted = administration.create_key(
        desk.books,
        desk.clerk,
        options.account,
        options.kind,
        scopes=frozenset(options.scopes) if options.scopes else None,
        label=options.label,
        seconds=None if options.days is None else options.days * DAY,
    )
    return _printed(desk, minted, "")


def _rotate(desk: Desk) -> Report:
    fresh = administration.rotate_key(desk.books, desk.clerk, desk.options.key, desk.options.hours * 3600)
    return _printed(
        desk, fresh, f"It takes the place of {desk.options.key}, which ends in {desk.options.hours} hours.\n"
    )


def _printed(desk: Desk, minted: Minted, before: str) -> Report:
    record = minted.record
    token = _token(desk.place, record.kind, minted.text)
    lines = [
        f"{before}Key {record.key_id} of {record.account_id}, shown this once:",
        minted.text,
        "With the address of this hub in it, which is what programs are given:",
        token,
        _USES[record.kind],
    ]
    values = {"key": _key_values(record, desk.now), "secret": minted.text, "token": token}
    return Report(values=values, text="\n".join(lines))


_USES = {
    KeyKind.PROVIDER: "For as many machines as the account has: distensor auth login, or DISTENSOR_API_KEY.",
    KeyKind.TRAINER: 'For scripts with ds.init(mode="hub"): DISTENSOR_TOKEN.',
    KeyKind.ADMIN: "For looking after the hub from elsewhere: DISTENSOR_TOKEN.",
}


def _token(place: Place, kind: KeyKind, text: str) -> str:
    role = Role.NODE if kind is KeyKind.PROVIDER else Role.TRAINER
    return place.token(role, text)


def _keys(desk: Desk) -> Report:
    name = desk.options.account
    if name is not None:
        administration.account_of(desk.books, name)
    keys = desk.books.list_keys(None if name is None else AccountId(name))
    rows = [
        (
            key.key_id,
            f"{key.shown}...",
            key.account_id,
            ", ".join(sorted(key.scopes)),
            _day(key.created_at),
            "never" if key.last_used_at is None else _day(key.last_used_at),
            _state(key, desk.now),
            key.label,
        )
        for key in keys
    ]
    text = table(("key", "begins", "account", "scopes", "since", "last used", "state", "label"), rows)
    return Report(values={"keys": [_key_values(key, desk.now) for key in keys]}, text=text)


def _revoke(desk: Desk) -> Report:
    name = _named(desk) if desk.options.key == "-" else desk.options.key
    key = administration.revoke_key(desk.books, desk.clerk, name)
    text = f"Key {key.key_id} of {key.account_id} is revoked. A running hub ends what is open by it within a second."
    return Report(values={"key": _key_values(key, desk.now)}, text=text)


def _named(desk: Desk) -> str:
    """The id of the key whose text stands on standard input: one that was found where it should not be."""
    text = sys.stdin.read(LONGEST_KEY).strip()
    try:
        decode_key(text)
    except AuthenticationError as error:
        raise ConfigError(f"standard input: {error}") from error
    key = desk.books.find_key(hash_secret(text))
    if key is None:
        raise ConfigError("standard input: a key of the right form that is none of this hub")
    return key.key_id


def _key_values(key: KeyRecord, now: int) -> dict[str, Any]:
    return {
        "key": key.key_id,
        "begins": key.shown,
        "kind": key.kind.value,
        "account": key.account_id,
        "scopes": sorted(key.scopes),
        "label": key.label,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "replaced_by": key.replaced_by,
        "state": _state(key, now),
    }


def _state(key: KeyRecord, now: int) -> str:
    if why := ended(key, now):
        return why.split()[-1]
    if key.expires_at is not None:
        return f"ends {_moment(key.expires_at)}"
    return "good"


# The audit log


def _audit(desk: Desk) -> Report:
    entries = desk.books.audit(desk.options.most, desk.options.before)
    rows = [
        (one.number, _moment(one.at), one.actor, one.action, one.target, one.outcome.value, one.detail)
        for one in entries
    ]
    text = table(("number", "when (UTC)", "who", "what", "to what", "", "more"), rows)
    return Report(values={"entries": [_entry_values(one) for one in entries]}, text=text)


def _entry_values(entry: AuditEntry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "at": entry.at,
        "actor": entry.actor,
        "action": entry.action,
        "target": entry.target,
        "outcome": entry.outcome.value,
        "detail": entry.detail,
    }


def _day(at: int) -> str:
    return _moment(at)[:10]


def _moment(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def arguments(argv: Sequence[str], common: Common) -> argparse.Namespace:
    """Read a command line that begins with one of VERBS."""
    return parser(argv[0], common).parse_args(argv[1:])
