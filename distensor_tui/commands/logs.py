"""`distensor logs`: events of the supervisor and lines of the log files, the last ones and those to come."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from distensor_tui import format as fmt
from distensor_tui.answers import fail, print_json, print_text, with_supervisor
from distensor_tui.clock import system_monotonic
from distensor_tui.exitcodes import ExitCode
from distensor_tui.fields import clean
from distensor_tui.model import Snapshot, Worker
from distensor_tui.once import Conversation, NoSupervisor
from distensor_tui.sections import apply
from distensor_tui.wire import Answer, Message, Update

QUIET_S = 3600.0
"""A supervisor sends its readings every few seconds; one that is silent for so long is gone."""
POLL_S = 2.0
MOST_LINES = 500
"""What the supervisor gives of a file at once."""
OWN = "supervisor"
T = TypeVar("T")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument("-n", dest="last", type=count, default=50, metavar="N", help="begin with so many (default 50)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--worker", metavar="ID", help="only this worker's log file; its rank or first letters do")
    what.add_argument("--supervisor", action="store_true", help="only the supervisor's own log file")
    what.add_argument("--events", action="store_true", help="only events: what the supervisor noticed")


def count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of lines from 0 on")
    return value


@dataclass(kw_only=True, slots=True)
class Tail:
    """One log file and what was printed of it. `worker` None is the supervisor's own."""

    worker: str | None
    seen: Sequence[str] = field(default=())

    @property
    def name(self) -> str:
        return self.worker or OWN

    def params(self) -> dict[str, object]:
        return {"lines": MOST_LINES, **({"worker": self.worker} if self.worker else {})}


def run(options: argparse.Namespace, path: Path) -> int:
    def do(conversation: Conversation) -> int:
        snapshot, raw = conversation.snapshot()
        reader = Reader(options, conversation, snapshot, raw)
        try:
            refused = reader.begin()
            if refused is not None:
                return fail(options, refused.code, refused.message or refused.code, refused.fix)
            if options.follow:
                reader.follow()
        except NoSupervisor:
            reader.take_missed()
            raise
        return ExitCode.OK

    return with_supervisor(options, path, do)


class Reader:
    """Prints what was asked for, then what comes."""

    def __init__(
        self, options: argparse.Namespace, conversation: Conversation, snapshot: Snapshot, raw: Mapping[str, Any]
    ) -> None:
        self._json, self._last = options.json, options.last
        self._conversation, self._snapshot = conversation, snapshot
        self._chosen = options.worker is not None or options.supervisor
        self._with_events = not self._chosen
        self._with_workers = self._with_events and not options.events
        self._events = _events(raw)
        name = None if options.worker is None else found_worker(snapshot.workers or (), options.worker)
        self._tails = {OWN if name is None else name: Tail(worker=name)} if self._chosen else {}

    def begin(self) -> Answer | None:
        """The last ones of each source; the answer for a file that was asked for and cannot be read."""
        self._note_workers()
        if self._with_events:
            self._print_events(last(self._events, self._last))
        for tail in list(self._tails.values()):
            answer = self._read(tail, last_only=True)
            if not answer.ok and self._chosen:
                return answer
        return None

    def follow(self) -> None:
        """Until the supervisor ends, or Ctrl-C."""
        while True:
            self.take_missed()
            for message in self._messages():
                self._take(message)
            self._note_workers()
            for tail in list(self._tails.values()):
                self._read(tail, last_only=False)
            self._conversation.lines.clear()

    def _messages(self) -> Iterator[Message]:
        """What came meanwhile; files are looked at every other second, events come by themselves."""
        if not self._tails and not self._with_workers:
            yield self._conversation.read(system_monotonic() + QUIET_S)
            return
        deadline = system_monotonic() + POLL_S
        while (message := self._conversation.wait(deadline)) is not None:
            yield message

    def take_missed(self) -> None:
        """What came while the answer for a file was waited for."""
        missed = [*self._conversation.updates]
        self._conversation.updates.clear()
        for message in missed:
            self._take(message)

    def _take(self, message: Message) -> None:
        if not isinstance(message, Update):
            return
        self._snapshot = apply(self._snapshot, message.data, full=message.full)
        if self._with_events and "events" in message.data:
            events = _events(message.data)
            self._print_events(fresh(self._events, events))
            self._events = events

    def _note_workers(self) -> None:
        """Files of the workers that there are now; who has gone has been read."""
        if self._with_workers:
            names = [worker.id for worker in self._snapshot.workers or ()]
            self._tails = {name: self._tails.get(name) or Tail(worker=name) for name in names}

    def _read(self, tail: Tail, *, last_only: bool) -> Answer:
        answer = self._conversation.ask("log_tail", tail.params())
        found = answer.result.get("lines") if answer.ok else None
        lines = [str(line) for line in found] if isinstance(found, list) else []
        for text in last(lines, self._last) if last_only else fresh(tail.seen, lines):
            self._print_line(tail, text)
        tail.seen = lines or tail.seen
        return answer

    def _print_line(self, tail: Tail, text: str) -> None:
        if self._json:
            print_json(
                {"line": {"source": OWN if tail.worker is None else "worker", "worker": tail.worker, "text": text}}
            )
        else:
            print_text(clean(text) if self._chosen else f"{clean(tail.name)} | {clean(text)}")

    def _print_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if self._json:
                print_json({"event": dict(event)})
            else:
                print_text(_event_text(event))


def found_worker(workers: Sequence[Worker], name: str) -> str:
    """The id that was meant; the name itself where it is none of now: files of workers that have ended are kept."""
    tests: tuple[Callable[[Worker], bool], ...] = (
        lambda worker: worker.id == name,
        lambda worker: str(worker.rank) == name,
        lambda worker: worker.id.startswith(name),
    )
    for fits in tests:
        ids = {worker.id for worker in workers if fits(worker)}
        if len(ids) == 1:
            return ids.pop()
    return name


def last(items: Sequence[T], number: int) -> Sequence[T]:
    return items[len(items) - min(number, len(items)) :]


def fresh(seen: Sequence[T], items: Sequence[T]) -> Sequence[T]:
    """The items behind the longest overlap: the supervisor keeps a window that slides, and repeats it."""
    for size in range(min(len(seen), len(items)), 0, -1):
        if list(seen[len(seen) - size :]) == list(items[:size]):
            return items[size:]
    return items


def _events(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = data.get("events")
    return [event for event in found if isinstance(event, Mapping)] if isinstance(found, list) else []


def _event_text(event: Mapping[str, Any]) -> str:
    at = event.get("at")
    hour = fmt.hour(at, None, with_seconds=True) if isinstance(at, int | float) else "--:--:--"
    words = [clean(str(event.get(name, ""))) for name in ("severity", "source", "text")]
    return f"{hour} {words[0]:<8} {words[1]:<10} {words[2]}"
