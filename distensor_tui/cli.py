"""`distensor`: the dashboard without a command; with one, the row of `table.py` says who does it.

What a command does not need is not imported: the start of the dashboard is measured in milliseconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distensor_tui.arguments import UsageError, build, build_verb, command_of, own_verb, place_of_verb
from distensor_tui.exitcodes import ExitCode
from distensor_tui.paths import SOCKET_VARIABLE, socket_path
from distensor_tui.table import BY_NAME
from distensor_tui.tty import fit_for_dashboard

if TYPE_CHECKING:
    import argparse

    from distensor_tui.recording import Moment
    from distensor_tui.table import Verb

DEMO = Path(__file__).with_name("demo.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except UsageError as error:
        return _wrong_usage(error, as_json="--json" in words)
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _dispatch(words: list[str]) -> int:
    place = place_of_verb(words)
    if place is None:
        options = build().parse_args(words)
        return _dashboard(options, socket_path(options.socket, os.environ))
    before = build().parse_args(words[:place])
    name, rest = words[place], words[place + 1 :]
    verb = own_verb(name)
    if verb is not None:
        return _own(verb, before, rest)
    from distensor_tui import verbs

    if before.socket is not None:  # `distensor --socket X doctor` reads like `distensor doctor --socket X`
        os.environ[SOCKET_VARIABLE] = before.socket
    return verbs.run(name, [*rest, *(["--json"] if before.json else [])])


def _own(verb: Verb, before: argparse.Namespace, rest: list[str]) -> int:
    command = command_of(verb)
    options = build_verb(verb, command).parse_args(rest)
    options.verb = verb.name
    options.json = options.json or before.json
    return command.run(options, socket_path(options.socket or before.socket, os.environ))


def _wrong_usage(error: UsageError, *, as_json: bool) -> int:
    from distensor_tui.verbs import say

    if not as_json:
        sys.stderr.write(error.usage + "\n")
    fix = "`distensor help COMMAND` shows examples"
    return say(str(error), fix, code="usage", exit_code=ExitCode.USAGE, as_json=as_json)


def _reader_gone() -> int:
    """`distensor status | head -1`: the rest is not wanted; nothing may be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK


def _dashboard(options: argparse.Namespace, path: Path) -> int:
    """The dashboard where it can be drawn, else the status as text."""
    if options.json:
        return _own(BY_NAME["status"], options, [])
    if options.demo and not DEMO.exists():
        return _no_demo()
    recording = DEMO if options.demo else Path(options.replay) if options.replay else None
    moments = None
    if recording is not None and (moments := _load(recording)) is None:
        return ExitCode.DATA_ERROR
    if options.screenshot is None and not fit_for_dashboard(os.environ, (sys.stdin, sys.stdout)):
        from distensor_tui import answers

        return answers.text_of(moments) if moments else answers.text_instead(path)
    from distensor_tui import show  # Textual costs 0.2 s

    return show.dashboard(options, path, moments)


def _no_demo() -> int:
    """Only recordings of real runs are shown, and a build may come without one."""
    sys.stderr.write(
        "distensor: this build comes without a recorded demo\n"
        "  a live one:         distensor demo\n"
        "  make a recording:   distensor record FILE    and show it:   distensor --replay FILE\n"
    )
    return ExitCode.NO_INPUT


def _load(recording: Path) -> list[Moment] | None:
    from distensor_tui.recording import RecordingError, load

    try:
        return load(recording)
    except RecordingError as error:
        sys.stderr.write(f"distensor: {error}\n")
        return None
