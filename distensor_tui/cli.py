"""`distensor`: the dashboard without a command, provider verbs with one. Exit codes after sysexits.

What a command does not need is not imported: the start of the dashboard is measured in milliseconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distensor_tui.arguments import OWN_VERBS, build, foreign_verb
from distensor_tui.paths import socket_path
from distensor_tui.tty import fit_for_dashboard

if TYPE_CHECKING:
    import argparse

    from distensor_tui.recording import Moment

OK, DATA_ERROR, NO_INPUT = 0, 65, 66
DEMO = Path(__file__).with_name("demo.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    foreign = foreign_verb(words)
    try:
        if foreign is not None:
            from distensor_tui import verbs

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
    from distensor_tui import answers

    return answers.record(options, path) if options.verb == "record" else answers.answer(options, path)


def _dashboard(options: argparse.Namespace, path: Path) -> int:
    """The dashboard where it can be drawn, else the status as text."""
    if options.demo and not DEMO.exists():
        return _no_demo()
    recording = DEMO if options.demo else Path(options.replay) if options.replay else None
    moments = None
    if recording is not None and (moments := _load(recording)) is None:
        return DATA_ERROR
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
    return NO_INPUT


def _load(recording: Path) -> list[Moment] | None:
    from distensor_tui.recording import RecordingError, load

    try:
        return load(recording)
    except RecordingError as error:
        sys.stderr.write(f"distensor: {error}\n")
        return None
