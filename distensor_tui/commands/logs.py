"""`distensor logs [-f] [-n N]`: the events that the supervisor keeps, and those to come."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distensor_tui import format as fmt
from distensor_tui.answers import print_json, print_text, with_supervisor
from distensor_tui.clock import system_monotonic
from distensor_tui.exitcodes import ExitCode
from distensor_tui.fields import clean
from distensor_tui.once import Conversation
from distensor_tui.wire import Update

QUIET_S = 3600.0
"""A supervisor sends its readings every few seconds; one that is silent for so long is gone."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new events until Ctrl-C")
    parser.add_argument("-n", dest="last", type=count, default=50, metavar="N", help="begin with so many (default 50)")


def count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of events from 0 on")
    return value


def run(options: argparse.Namespace, path: Path) -> int:
    def do(conversation: Conversation) -> int:
        _, raw = conversation.snapshot()
        events = _events(raw)
        for event in events[len(events) - min(options.last, len(events)) :]:
            _print(event, as_json=options.json)
        if options.follow:
            _follow(conversation, events, as_json=options.json)
        return ExitCode.OK

    return with_supervisor(options, path, do)


def _follow(conversation: Conversation, seen: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    while True:
        message = conversation.read(system_monotonic() + QUIET_S)
        if isinstance(message, Update) and "events" in message.data:
            events = _events(message.data)
            for event in fresh(seen, events):
                _print(event, as_json=as_json)
            seen = events
        conversation.lines.clear()


def fresh(seen: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events behind the longest overlap: the supervisor keeps a window that slides, and repeats it."""
    for size in range(min(len(seen), len(events)), 0, -1):
        if list(seen[len(seen) - size :]) == list(events[:size]):
            return events[size:]
    return events


def _events(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = data.get("events")
    return [event for event in found if isinstance(event, Mapping)] if isinstance(found, list) else []


def _print(event: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json({"event": dict(event)})
        return
    at = event.get("at")
    hour = fmt.hour(at, None, with_seconds=True) if isinstance(at, int | float) else "--:--:--"
    words = [clean(str(event.get(name, ""))) for name in ("severity", "source", "text")]
    print_text(f"{hour} {words[0]:<8} {words[1]:<10} {words[2]}")
