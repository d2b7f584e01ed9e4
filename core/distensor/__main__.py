"""`python -m distensor VERB`: the verbs of this wheel, found through the entry points `distensor.verbs`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from distensor import __version__

USAGE = 64


def main(argv: Sequence[str]) -> int:
    """Run a verb; without one, list them."""
    verbs = {entry.name: entry for entry in entry_points(group="distensor.verbs")}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(verbs))  # noqa: T201  # a command line prints
        return 0
    if argv[0] == "--version":
        print(f"distensor {__version__}")  # noqa: T201  # as above
        return 0
    verb = verbs.get(argv[0])
    if verb is None:
        print(f"distensor: no verb {argv[0]!r}\n{_help(verbs)}", file=sys.stderr)  # noqa: T201  # as above
        return USAGE
    run: Callable[[list[str]], int] = verb.load()
    return run(list(argv[1:]))


def _help(verbs: dict[str, EntryPoint]) -> str:
    names = "\n".join(f"  {name}" for name in sorted(verbs))
    return f"usage: python -m distensor VERB [OPTIONS]\n\nverbs:\n{names}\n\nVERB --help tells more."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
