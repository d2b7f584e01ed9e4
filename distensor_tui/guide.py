"""Help that teaches, made from the table: what a command does, examples, what comes next. Pure."""

from __future__ import annotations

from distensor_tui.exitcodes import MEANINGS
from distensor_tui.table import VERBS, Group, Verb

_LATER = " (not in this version)"
_BARE = (
    ("distensor", "the dashboard; the status as text without a terminal"),
    ("distensor --demo", "the dashboard with a recording, without a supervisor"),
)


def overview() -> str:
    """The text of `distensor --help`. `{options}` stands for what argparse knows."""
    rows = ["What this machine does and earns in disTensor.", "", *_examples(_BARE)]
    for group in Group:
        rows += ["", f"{group}:"]
        rows += [
            f"  {verb.name:<11} {verb.about}{_LATER if verb.planned else ''}" for verb in VERBS if verb.group is group
        ]
    rows += [
        "",
        "{options}",
        "`distensor help COMMAND` shows examples; `distensor help exit-codes` what each exit code means.",
        "Every command takes --json. NO_COLOR is honoured.",
    ]
    return "\n".join(rows) + "\n"


def page(verb: Verb) -> str:
    """The text of `distensor COMMAND --help`."""
    return "\n".join([verb.about, "", "{options}", *taught(verb)]) + "\n"


def taught(verb: Verb) -> list[str]:
    """The examples and what comes next."""
    return ["Examples:", *_examples(verb.examples), "", f"Next: {verb.then}"]


def exit_codes() -> str:
    return "\n".join(f"{int(code):>4}  {meaning}" for code, meaning in MEANINGS.items())


def _examples(examples: tuple[tuple[str, str], ...]) -> list[str]:
    width = max(len(line) for line, _ in examples)
    return [f"  {line:<{width}}   {does}" for line, does in examples]


def markdown() -> str:
    """The page of the documents: docs/commands.md."""
    rows = ["# Commands of `distensor`", "", _INTRODUCTION, ""]
    for verb in VERBS:
        where = f" (wheel `{verb.wheel}`)" if verb.wheel else ""
        rows += [f"## {verb.name}{where}", f"{verb.about}{_LATER if verb.planned else ''}", "", "```bash"]
        rows += [f"{line}  # {does}" for line, does in verb.examples]
        rows += ["```", f"Next: {verb.then}", ""]
    rows += ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    rows += [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(rows) + "\n"


_INTRODUCTION = """\
This page is made from the table in `distensor_tui/table.py`; a test compares them (`UPDATE_GOLDEN=1` writes it again).
Without a command `distensor` opens the dashboard. Where that cannot be drawn (no terminal, `TERM=dumb`, smaller than
60x15) it prints the status as text and ends with 0. Every command takes `--json`: one object on one line with `"v": 1`
and `"ok"`; an answer with `"ok": false` carries `error` with `code`, `message` and `fix`;
[schemas](schemas) describe each answer. The text commands use no
colours; the dashboard honours `NO_COLOR`, and takes `--ascii` and `--no-mouse`. The supervisor's socket is given by
`--socket` or `DISTENSOR_SOCKET`."""
