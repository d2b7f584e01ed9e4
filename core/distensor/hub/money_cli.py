"""`distensor hub deposit`, `payout`, `hold`, `statement`, `price`: the operator's work on the ledger of any hub.

Amounts are credits with up to six decimals; JSON and CSV have whole micro-credits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from distensor.core.commandline import UsageParser
from distensor.core.errors import ConfigError, LedgerError
from distensor.core.money import credits_text, parse_credits
from distensor.core.table import table
from distensor.hub import cashier
from distensor.hub.access_cli import Common, Desk, Report, Run
from distensor.hub.ledger.statements import By, to_csv, to_json
from distensor.hub.ledger_queries import PayoutLine, accounts_named, payouts, statement, totals, trainer_money
from distensor.hub.objections import held_work

VERBS = ("deposit", "payout", "hold", "statement", "price")
LONGEST_WINDOW = 24 * 365


def arguments(argv: Sequence[str], common: Common) -> argparse.Namespace:
    """Read a command line that begins with one of VERBS."""
    return parser(argv[0], common).parse_args(argv[1:])


def parser(verb: str, common: Common) -> argparse.ArgumentParser:
    """The parser of one of VERBS; `common` adds the options that say where the books are. Its results have `run`."""
    make = {
        "deposit": _deposit_parser,
        "payout": _payout_parser,
        "hold": _hold_parser,
        "statement": _statement_parser,
        "price": _price_parser,
    }
    return make[verb](common)


def _command(commands: Any, common: Common, name: str, about: str, run: Run) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    common(command)
    command.set_defaults(run=run)
    return command


def _credits(text: str) -> int:
    try:
        return parse_credits(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _deposit_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub deposit", description="Enter what an account has paid in.")
    common(top)
    top.add_argument("account")
    top.add_argument("amount", type=_credits, metavar="CREDITS")
    top.add_argument("--key", required=True, help="of the bank's receipt: the same again is the same deposit")
    top.set_defaults(run=_deposit)
    return top


def _payout_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub payout", description="Pay nodes by hand, and say what became of it.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    show = _command(commands, common, "list", "Show payouts.", _payouts)
    show.add_argument("node", nargs="?", help="only those of this node")
    make = _command(commands, common, "make", "Set aside what is payable; then pay it.", _make)
    make.add_argument("name", help="a node, or an account for all its nodes")
    make.add_argument("amount", nargs="?", type=_credits, metavar="CREDITS", help="a part of it, for one node")
    make.add_argument("--key", help="the payout's id, for one node: the same again is the same payout")
    confirm = _command(commands, common, "confirm", "It was paid.", _confirm)
    fail = _command(commands, common, "fail", "It was not paid, and will not be: it is payable again.", _failed)
    for command in (confirm, fail):
        command.add_argument("payout", help="its id")
        command.add_argument("--reason", default="", help="for the audit log")
    return top


def _hold_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor hub hold", description="Decide on work that a spot check found different.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, common, "list", "Show what is held.", _held)
    release = _command(commands, common, "release", "It was right: it goes on as if nobody had objected.", _release)
    void = _command(commands, common, "void", "It was wrong: it goes back to the trainer, with the fee.", _void)
    for command in (release, void):
        command.add_argument("job", help="its id")
        command.add_argument("node", help="its id")
        command.add_argument("--reason", default="", help="for the audit log")
    return top


def _statement_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(
        prog="distensor hub statement",
        description="What came and went in the ledger, for a node, an account, or the whole hub.",
    )
    common(top)
    top.add_argument("name", nargs="?", metavar="ACCOUNT|NODE", help="without it: the sums of the whole ledger")
    top.add_argument("--by", type=By, choices=list(By), default=By.DAY, metavar="|".join(By), help="how to group (day)")
    top.add_argument("--format", choices=("text", "json", "csv"), default="text", help="(text)")
    top.set_defaults(run=_statement)
    return top


def _price_parser(common: Common) -> argparse.ArgumentParser:
    top = UsageParser(
        prog="distensor hub price",
        description="Show or set what work costs. It holds for jobs that are submitted from now on.",
    )
    common(top)
    top.add_argument("--micro", type=_whole, metavar="N", help="micro-credits of one micro-batch on one rank")
    top.add_argument("--fee", type=_whole, metavar="N", help="thousandths of it that are the platform's (0 to 999)")
    top.add_argument("--challenge-hours", type=_whole, metavar="N", help="after how many hours a credit is payable")
    top.add_argument("--deposits", choices=("required", "none"), help="whether a job needs a deposit for its quote")
    top.set_defaults(run=_price)
    return top


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 to 999999999")
    return int(text)


def _deposit(desk: Desk) -> Report:
    options = desk.options
    transfer = cashier.deposit(desk.books, desk.clerk, options.account, options.amount, options.key)
    there = trainer_money(desk.books, options.account)
    text = f"{credits_text(options.amount)} credits by {options.key} are in the deposit of {options.account}; "
    return Report(
        values={"key": transfer.key, "micro": options.amount, "money": asdict(there)},
        text=f"{text}it has {credits_text(there.deposit)}, and {credits_text(there.escrow)} set aside for jobs.",
    )


def _payouts(desk: Desk) -> Report:
    return _report(payouts(desk.books, desk.options.node))


def _make(desk: Desk) -> Report:
    return _report(
        cashier.make_payouts(desk.books, desk.clerk, desk.options.name, desk.options.amount, desk.options.key)
    )


def _confirm(desk: Desk) -> Report:
    options = desk.options
    return _report((cashier.end_payout(desk.books, desk.clerk, options.payout, paid=True, reason=options.reason),))


def _failed(desk: Desk) -> Report:
    options = desk.options
    return _report((cashier.end_payout(desk.books, desk.clerk, options.payout, paid=False, reason=options.reason),))


def _report(lines: Sequence[PayoutLine]) -> Report:
    rows = [(one.payout_id, one.node_id, credits_text(one.micro), one.standing.value) for one in lines]
    text = table(("payout", "node", "credits", "state"), rows) if rows else "No payouts."
    return Report(values={"payouts": [asdict(one) for one in lines]}, text=text)


def _held(desk: Desk) -> Report:
    found = held_work(desk.books)
    rows = [(one.job_id, one.node_id, one.owner, one.objections, credits_text(one.micro)) for one in found]
    text = table(("job", "node", "trainer", "units", "credits"), rows) if rows else "Nothing is held."
    return Report(values={"held": [asdict(one) for one in found]}, text=text)


def _release(desk: Desk) -> Report:
    return _decided(desk, good=True)


def _void(desk: Desk) -> Report:
    return _decided(desk, good=False)


def _decided(desk: Desk, *, good: bool) -> Report:
    options = desk.options
    micro = cashier.decide(desk.books, desk.clerk, options.job, options.node, good=good, reason=options.reason)
    where = f"go on to node {options.node}" if good else "are back with the trainer"
    return Report(values={"micro": micro}, text=f"{credits_text(micro)} credits of job {options.job} {where}.")


def _statement(desk: Desk) -> Report:
    options = desk.options
    if options.name is None:
        sums = totals(desk.books)
        rows = [*sums.groups.items(), ("all together", sums.total)]
        shown = table(("accounts", "credits"), [(name, credits_text(micro)) for name, micro in rows])
        return Report(values=asdict(sums), text=json.dumps(asdict(sums)) if options.format == "json" else shown)
    lines = statement(desk.books, accounts_named(desk.books, options.name), options.by)
    shown = table(
        ("account", options.by.value, "what", "transfers", "credits"),
        [(one.account, one.group or "-", one.kind, one.transfers, credits_text(one.micro)) for one in lines],
    )
    texts = {"text": lambda: shown, "json": lambda: to_json(lines), "csv": lambda: to_csv(lines).rstrip("\n")}
    return Report(values={"lines": [asdict(one) for one in lines]}, text=texts[options.format]())


def _price(desk: Desk) -> Report:
    options, before = desk.options, desk.books.policy()
    hours, deposits = options.challenge_hours, options.deposits
    if hours is not None and hours > LONGEST_WINDOW:
        raise ConfigError(f"--challenge-hours {hours}: expected at most {LONGEST_WINDOW}, a year")
    try:
        policy = replace(
            before,
            micro_per_micro_batch=before.micro_per_micro_batch if options.micro is None else options.micro,
            fee_per_mille=before.fee_per_mille if options.fee is None else options.fee,
            challenge_seconds=before.challenge_seconds if hours is None else hours * 3600,
            deposits=before.deposits if deposits is None else deposits == "required",
        )
    except LedgerError as error:
        raise ConfigError(str(error)) from error
    cashier.set_terms(desk.books, desk.clerk, policy)
    return Report(values={"terms": asdict(policy)}, text=f"For new jobs: {cashier.terms_text(policy)}.")
