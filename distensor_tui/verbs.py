"""Verbs of the other wheels, found through their entry points, so that the dashboard needs none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "distensor.verbs"
USAGE, UNAVAILABLE = 64, 69
WHEELS: Mapping[str, str] = {
    "hub": "distensor",
    "demo": "distensor[worker]",
    "cloud": "distensor[cloud]",
    "relay": "distensor",
}
"""Where a verb comes from, for those who do not have it."""

Find: TypeAlias = "Callable[[str], EntryPoint | None]"


def find(verb: str) -> EntryPoint | None:
    """The entry point of a verb, when some wheel has it."""
    from importlib.metadata import entry_points  # costs 20 ms, which no other command needs

    return next(iter(entry_points(group=GROUP, name=verb)), None)


def run(verb: str, arguments: Sequence[str], own: Sequence[str], find_verb: Find = find) -> int:
    """Run another wheel's verb with the rest of the command line, or say what is missing."""
    found = find_verb(verb)
    if found is None:
        return _missing(verb, own)
    try:
        main = found.load()
    except ImportError as error:
        return _say(f"'{verb}' is installed, but cannot start: {error}", f"pip install '{_wheel(verb)}'", UNAVAILABLE)
    return int(main(list(arguments)) or 0)


def _missing(verb: str, own: Sequence[str]) -> int:
    if verb in WHEELS:
        wheel = WHEELS[verb]
        return _say(
            f"'{verb}' is part of the wheel {wheel}, which is not installed", f"pip install '{wheel}'", UNAVAILABLE
        )
    import difflib

    near = difflib.get_close_matches(verb, [*own, *WHEELS], n=1)
    hint = f"did you mean '{near[0]}'?" if near else "distensor --help lists the commands"
    return _say(f"there is no command '{verb}'", hint, USAGE)


def _wheel(verb: str) -> str:
    return WHEELS.get(verb, "distensor")


def _say(problem: str, fix: str, code: int) -> int:
    sys.stderr.write(f"distensor: {problem}\n  {fix}\n")
    return code
