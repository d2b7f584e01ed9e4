"""The page for people who lend a machine: every command on it exists and takes what is written there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from installer_kit import INSTALLERS

from distensor_tui.arguments import build_verb, command_of
from distensor_tui.table import BY_NAME

PAGE = (Path(__file__).parents[2] / "docs/provider.md").read_text()
MAKEFILE = (INSTALLERS.parent / "Makefile").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page(line: str) -> None:
    words = [word for word in shlex.split(line) if word != "sudo" and not re.match(r"[A-Z_]+=", word)]
    if words[0] in ("make", "git"):
        assert words[1] in ("pull", *re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
        return
    if words[0] == "bash":
        assert (INSTALLERS.parent / words[1]).is_file()
        return
    assert words[0] == "distensor"
    if len(words) == 1:
        return
    verb = BY_NAME[words[1]]
    assert not verb.planned
    if verb.module:
        assert build_verb(verb, command_of(verb)).parse_args(words[2:])
    else:
        assert all(word in (*verb.flags, *verb.words) for word in words[2:])
