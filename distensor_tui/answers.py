"""What commands share: ask the supervisor once, print text or JSON, say an error as code, cause and fix."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor_tui import plain
from distensor_tui.absence import Absence
from distensor_tui.background import explained
from distensor_tui.clock import system_now
from distensor_tui.exitcodes import ExitCode
from distensor_tui.once import Conversation, NoSupervisor, converse

if TYPE_CHECKING:
    from distensor_tui.recording import Moment


def show(options: argparse.Namespace, path: Path, text: plain.Show, sections: Sequence[str]) -> int:
    """Print what the supervisor reports: `text` of the snapshot, or these sections as JSON."""

    def do(conversation: Conversation) -> int:
        snapshot, raw = conversation.snapshot()
        if options.json:
            print_json({"server_version": conversation.hello.server_version, **{s: raw.get(s) for s in sections}})
        else:
            print_text(text(snapshot, system_now()))
        return ExitCode.OK

    return with_supervisor(options, path, do)


def order(options: argparse.Namespace, path: Path, params: Mapping[str, Any], done: str) -> int:
    """Ask for the method that is called like the command; `done` is said when the supervisor agreed."""
    return ask(options, path, options.verb, params, lambda _result: done)


def ask(
    options: argparse.Namespace,
    path: Path,
    method: str,
    params: Mapping[str, Any],
    text: Callable[[Mapping[str, Any]], str],
) -> int:
    """Ask for a method and print its result, or its refusal with the fix."""

    def do(conversation: Conversation) -> int:
        found = conversation.ask(method, params)
        if not found.ok:
            return fail(options, found.code, found.message or found.code, found.fix)
        if options.json:
            print_json({"result": dict(found.result)})
        else:
            print_text(text(found.result))
        return ExitCode.OK

    return with_supervisor(options, path, do)


def with_supervisor(options: argparse.Namespace, path: Path, do: Callable[[Conversation], int]) -> int:
    """Talk to the supervisor, or say why there is none."""
    try:
        with converse(path) as conversation:
            return do(conversation)
    except NoSupervisor as missing:
        return absent(missing.why, as_json=options.json)


def fail(options: argparse.Namespace, code: str, message: str, fix: str, exit_code: int = ExitCode.UNAVAILABLE) -> int:
    """Say an error: its cause, its fix, its code. Gives the exit code back."""
    if options.json:
        _write_json({"v": 1, "ok": False, "error": {"code": code, "message": message, "fix": fix}})
    else:
        sys.stderr.write(
            f"distensor: {options.verb} failed: {message}\n"
            + (f"  {fix}\n" if fix else "")
            + f"  ({code}, exit {exit_code})\n"
        )
    return exit_code


def absent(why: Absence, *, as_json: bool) -> int:
    """Say why there is no supervisor."""
    why = explained(why)
    if as_json:
        fix = "; ".join(" ".join(part.split()) for part in why.fix)
        error = {"code": str(why.reason), "message": f"{why.title}. {why.detail}", "fix": fix}
        _write_json({"v": 1, "ok": False, "error": error})
    else:
        sys.stderr.write(f"{plain.absent(why)}\n  ({why.reason}, exit {why.exit_code})\n")
    return why.exit_code


def print_json(value: Mapping[str, Any]) -> None:
    """One answer that went well."""
    _write_json({"v": 1, "ok": True, **value})


def _write_json(value: Mapping[str, Any]) -> None:
    print_text(json.dumps(value, separators=(",", ":"), ensure_ascii=True))


def print_text(text: str) -> None:
    """Write what the output can carry; other characters become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    sys.stdout.flush()


def text_instead(path: Path) -> int:
    """The dashboard where there is no terminal. That is no error: scripts and pipes get the text and exit 0."""
    try:
        with converse(path) as conversation:
            snapshot, _ = conversation.snapshot()
            print_text(plain.status(snapshot, system_now()))
    except NoSupervisor as missing:
        print_text(plain.absent(explained(missing.why)))
    return ExitCode.OK


def text_of(moments: list[Moment]) -> int:
    """A recording where there is no terminal: its last state."""
    from distensor_tui.recording import outcome

    print_text("from a recording, not live\n" + plain.status(outcome(moments), moments[-1].at))
    return ExitCode.OK
