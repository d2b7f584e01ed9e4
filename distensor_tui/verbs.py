"""Commands of the other wheels, found through their entry points, so that the dashboard needs none of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from distensor_tui.exitcodes import ExitCode
from distensor_tui.table import BY_NAME

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "distensor.verbs"

Find: TypeAlias = "Callable[[str], EntryPoint | None]"
VersionOf: TypeAlias = Callable[[str], "str | None"]


def find(verb: str) -> EntryPoint | None:
    """The entry point of a command, when some wheel has it."""
    from importlib.metadata import entry_points  # costs 20 ms, which no other command needs

    return next(iter(entry_points(group=GROUP, name=verb)), None)


def version_of(wheel: str) -> str | None:
    """The installed version of a wheel."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(wheel.partition("[")[0])
    except PackageNotFoundError:
        return None


def run(verb: str, arguments: Sequence[str], find_verb: Find = find, installed: VersionOf = version_of) -> int:
    """Run another wheel's command with the rest of the command line, or say what is missing."""
    as_json = "--json" in arguments
    found = find_verb(verb)
    if found is None:
        return _missing(verb, installed, as_json=as_json)
    try:
        main = found.load()
    except ImportError as error:
        problem = f"'{verb}' is installed, but cannot start: {error}"
        fix = f"pip install '{_wheel(verb)}'"
        return say(problem, fix, code="broken_wheel", exit_code=ExitCode.UNAVAILABLE, as_json=as_json)
    return int(main(list(arguments)) or 0)


def _missing(verb: str, installed: VersionOf, *, as_json: bool) -> int:
    if verb not in BY_NAME:
        problem, fix = f"there is no command '{verb}'", _nearest(verb)
        return say(problem, fix, code="usage", exit_code=ExitCode.USAGE, as_json=as_json)
    wheel = _wheel(verb)
    version = installed(wheel)
    if version is None:
        problem, fix = f"'{verb}' is part of the wheel {wheel}, which is not installed", f"pip install '{wheel}'"
    else:
        problem = f"'{verb}' is not part of {wheel} {version}, which is installed"
        fix = f"a newer version may have it: pip install --upgrade '{wheel}'"
    return say(problem, fix, code="missing_command", exit_code=ExitCode.UNAVAILABLE, as_json=as_json)


def _nearest(verb: str) -> str:
    import difflib

    near = difflib.get_close_matches(verb, list(BY_NAME), n=1)
    return f"did you mean '{near[0]}'?" if near else "distensor --help lists the commands"


def _wheel(verb: str) -> str:
    """A command of this wheel that asks another one for a part of its work asks the library."""
    return (BY_NAME[verb].wheel if verb in BY_NAME else "") or "distensor"


def say(problem: str, fix: str, *, code: str, exit_code: int, as_json: bool) -> int:
    """An error before any command runs: its cause, its fix, its code."""
    if as_json:
        error = {"code": code, "message": problem, "fix": fix}
        sys.stdout.write(json.dumps({"v": 1, "ok": False, "error": error}, separators=(",", ":")) + "\n")
    else:
        sys.stderr.write(f"distensor: {problem}\n  {fix}\n  ({code}, exit {int(exit_code)})\n")
    return exit_code
