"""The commands that ask the supervisor once, print the answer and end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor_tui import plain
from distensor_tui.absence import Absence
from distensor_tui.arguments import ORDERS
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.once import Conversation, NoSupervisor, converse
from distensor_tui.wire import Answer

if TYPE_CHECKING:
    from distensor_tui.recording import Moment

OK, UNAVAILABLE, CANNOT_CREATE = 0, 69, 73
_TEXTS = {
    "status": plain.status,
    "why": plain.why,
    "devices": plain.devices,
    "jobs": plain.jobs,
    "earnings": plain.earnings,
}
_SECTIONS = {
    "status": ("node", "hub", "devices", "workers", "jobs", "earnings", "unavailable"),
    "why": ("node",),
    "devices": ("devices",),
    "jobs": ("jobs", "workers"),
    "earnings": ("earnings",),
}


def answer(options: argparse.Namespace, path: Path) -> int:
    """`status`, `why`, `devices`, `jobs`, `earnings`, `pause`, `resume`, `drain`."""
    try:
        with converse(path) as conversation:
            return _order(options, conversation) if options.verb in ORDERS else _show(options, conversation)
    except NoSupervisor as missing:
        return _absent(missing.why, as_json=options.json)


def _show(options: argparse.Namespace, conversation: Conversation) -> int:
    snapshot, raw = conversation.snapshot()
    if options.json:
        sections = {name: raw.get(name) for name in _SECTIONS[options.verb]}
        _json({"v": 1, "ok": True, "server_version": conversation.hello.server_version, **sections})
    else:
        _print(_TEXTS[options.verb](snapshot, system_now()))
    sys.stdout.flush()
    return OK


def _order(options: argparse.Namespace, conversation: Conversation) -> int:
    """Send pause, resume or drain, and say what the supervisor answered."""
    seconds = getattr(options, "seconds", None)
    found = conversation.ask(options.verb, {"seconds": seconds} if seconds else {})
    if options.json:
        error = None if found.ok else {"code": found.code, "message": found.message, "fix": found.fix}
        _json({"v": 1, "ok": found.ok, "result": dict(found.result), "error": error})
    else:
        _say_answer(options.verb, found)
    return OK if found.ok else UNAVAILABLE


_DONE = {
    "pause": "paused: this node takes no work and earns nothing until it resumes",
    "resume": "resumed",
    "drain": "draining: the running step is finished, no new work is taken",
}


def _say_answer(verb: str, found: Answer) -> None:
    if found.ok:
        _print(_DONE[verb])
        return
    sys.stderr.write(f"distensor: {verb} failed: {found.message or found.code}\n")
    if found.fix:
        sys.stderr.write(f"  {found.fix}\n")


def _absent(why: Absence, *, as_json: bool) -> int:
    if as_json:
        fix = [" ".join(part.split()) for part in why.fix]
        error = {"code": str(why.reason), "message": f"{why.title}. {why.detail}", "fix": "; ".join(fix)}
        _json({"v": 1, "ok": False, "error": error})
    else:
        sys.stderr.write(plain.absent(why) + "\n")
    return why.exit_code


def _json(value: dict[str, Any]) -> None:
    _print(json.dumps(value, separators=(",", ":"), ensure_ascii=True))


def _print(text: str) -> None:
    """Write what the output can carry; other characters become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def text_instead(path: Path) -> int:
    """The dashboard where there is no terminal. That is no error: scripts and pipes get the text and exit 0."""
    try:
        with converse(path) as conversation:
            snapshot, _ = conversation.snapshot()
            _print(plain.status(snapshot, system_now()))
    except NoSupervisor as missing:
        _print(plain.absent(missing.why))
    return OK


def text_of(moments: list[Moment]) -> int:
    """A recording where there is no terminal: its last state."""
    from distensor_tui.recording import outcome

    _print("from a recording, not live\n" + plain.status(outcome(moments), moments[-1].at))
    return OK


def record(options: argparse.Namespace, path: Path) -> int:
    """`record FILE`: the supervisor's stream with its times."""
    from distensor_tui.recording import record as lines_of

    try:
        with Path(options.file).open("w", encoding="utf-8") as file:
            for row in lines_of(path, options.seconds, now=system_now, monotonic=system_monotonic):
                file.write(row)
                file.flush()
    except NoSupervisor as missing:
        return _absent(missing.why, as_json=False)
    except OSError as error:
        sys.stderr.write(f"distensor: cannot write {options.file}: {error.strerror}\n")
        return CANNOT_CREATE
    return OK
