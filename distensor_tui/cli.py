"""`distensor`: the dashboard without a command, provider verbs with one. Exit codes after sysexits."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor_tui import plain, verbs
from distensor_tui.absence import Absence
from distensor_tui.arguments import ORDERS, OWN_VERBS, build, foreign_verb
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.once import Conversation, NoSupervisor, converse
from distensor_tui.paths import socket_path
from distensor_tui.tty import fit_for_dashboard
from distensor_tui.wire import Answer

if TYPE_CHECKING:
    from distensor_tui.model import Snapshot

OK, DATA_ERROR, UNAVAILABLE, CANNOT_CREATE = 0, 65, 69, 73
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    foreign = foreign_verb(words)
    try:
        if foreign is not None:
            return verbs.run(words[foreign], words[foreign + 1 :], OWN_VERBS)
        return _own(build().parse_args(words))
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        return 130


def _reader_gone() -> int:
    """`distensor status | head -1`: the rest is not wanted; nothing may be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _own(options: argparse.Namespace) -> int:
    path = socket_path(options.socket, os.environ)
    if options.verb is None:
        return _dashboard(options, path)
    if options.verb == "record":
        return _record(options, path)
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
    answer = conversation.ask(options.verb, {"seconds": seconds} if seconds else {})
    if options.json:
        error = None if answer.ok else {"code": answer.code, "message": answer.message, "fix": answer.fix}
        _json({"v": 1, "ok": answer.ok, "result": dict(answer.result), "error": error})
    else:
        _say_answer(options.verb, answer)
    return OK if answer.ok else UNAVAILABLE


_DONE = {"pause": "paused", "resume": "resumed", "drain": "draining: running work is finished, no new work is taken"}


def _say_answer(verb: str, answer: Answer) -> None:
    if answer.ok:
        _print(_DONE[verb])
        return
    sys.stderr.write(f"distensor: {verb} failed: {answer.message or answer.code}\n")
    if answer.fix:
        sys.stderr.write(f"  {answer.fix}\n")


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
    sys.stdout.write(
        text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8") + "\n"
    )


def _dashboard(options: argparse.Namespace, path: Path) -> int:
    """The dashboard where it can be drawn, else the status as text."""
    recording = _recording(options)
    if options.screenshot is None and not fit_for_dashboard(os.environ, (sys.stdin, sys.stdout)):
        return _text_instead(path) if recording is None else _recorded_text(recording)
    from distensor_tui import show  # Textual costs 0.2 s and is only needed here

    return show.dashboard(options, path, recording)


def _recording(options: argparse.Namespace) -> Path | None:
    if options.demo:
        return Path(__file__).with_name("demo.jsonl")
    return Path(options.replay) if options.replay else None


def _text_instead(path: Path) -> int:
    """Not a terminal is no error: scripts and pipes get the text and exit 0."""
    try:
        with converse(path) as conversation:
            snapshot, _ = conversation.snapshot()
            _print(plain.status(snapshot, system_now()))
    except NoSupervisor as missing:
        _print(plain.absent(missing.why))
    return OK


def _recorded_text(recording: Path) -> int:
    from distensor_tui.recording import RecordingError, load, outcome

    try:
        moments = load(recording)
    except RecordingError as error:
        sys.stderr.write(f"distensor: {error}\n")
        return DATA_ERROR
    snapshot: Snapshot = outcome(moments)
    _print(f"recording  {recording}\n" + plain.status(snapshot, moments[-1].at))
    return OK


def _record(options: argparse.Namespace, path: Path) -> int:
    from distensor_tui.recording import record

    try:
        with Path(options.file).open("w", encoding="utf-8") as file:
            for row in record(path, options.seconds, now=system_now, monotonic=system_monotonic):
                file.write(row)
                file.flush()
    except NoSupervisor as missing:
        return _absent(missing.why, as_json=False)
    except OSError as error:
        sys.stderr.write(f"distensor: cannot write {options.file}: {error.strerror}\n")
        return CANNOT_CREATE
    return OK
