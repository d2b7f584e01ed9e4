"""The table of commands: help, documents and completion that are made from it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from distensor_tui import guide
from distensor_tui.arguments import build_verb, command_of
from distensor_tui.cli import main
from distensor_tui.commands.logs import fresh
from distensor_tui.exitcodes import MEANINGS, ExitCode
from distensor_tui.table import BY_NAME, VERBS, Verb

PAGE = Path(__file__).parents[2] / "docs/commands.md"
OWN = [verb for verb in VERBS if verb.module]
CONTRACT = (
    "status why devices jobs earnings limits pause resume drain logs auth doctor bugreport service completion "
    "uninstall demo hub cloud"
)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code: object
    try:
        code = main(list(words))
    except SystemExit as ended:
        code = ended.code  # argparse ends by itself behind --help
    assert code == 0
    return capsys.readouterr().out


def test_every_command_of_the_contract_has_its_row() -> None:
    assert set(CONTRACT.split()) <= BY_NAME.keys()
    assert len(BY_NAME) == len(VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_row_teaches(verb: Verb) -> None:
    assert bool(verb.module) != bool(verb.wheel)
    assert re.fullmatch(r"[A-Z][^.]*\.", verb.about), "one sentence"
    assert verb.examples
    assert verb.then


@pytest.mark.parametrize("verb", OWN, ids=lambda verb: verb.name)
def test_the_examples_of_our_own_commands_are_right(verb: Verb) -> None:
    lines = [shlex.split(line.removeprefix("source <(").rstrip(")"), comments=True) for line, _ in verb.examples]
    mine = [words[2:] for words in lines if words[:2] == ["distensor", verb.name]]
    assert mine
    for words in mine:
        build_verb(verb, command_of(verb)).parse_args(words[: words.index(">")] if ">" in words else words)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_shows_the_sentence_the_examples_and_what_comes_next(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "help", verb.name)
    assert verb.about in text
    assert all(line in text and does in text for line, does in verb.examples)
    assert f"Next: {verb.then}" in text


@pytest.mark.parametrize("verb", OWN, ids=lambda verb: verb.name)
def test_our_own_commands_take_json_socket_and_help(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, verb.name, "--help")
    assert "--json" in text
    assert "--socket" in text
    assert verb.then in text


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (said(capsys, "--help"), said(capsys, "help")):
        assert [verb.name for verb in VERBS if f"  {verb.name:<11} {verb.about}" not in text] == []
        assert "{options}" not in text


def test_help_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(said(capsys, "help", "pause", "--json"))
    assert value["v"] == 1
    assert [row["name"] for row in value["commands"]] == ["pause"]
    assert value["exit_codes"].keys() == {str(int(code)) for code in ExitCode}


def test_help_on_nothing_known_is_64(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "nothing"]) == 64
    assert "no command 'nothing'" in capsys.readouterr().err


def test_every_exit_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert MEANINGS.keys() == set(ExitCode)
    text = said(capsys, "help", "exit-codes")
    assert [code for code in ExitCode if f"{int(code):>4}  {MEANINGS[code]}" not in text] == []


def test_the_page_of_the_documents_is_the_table() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(guide.markdown())
    assert PAGE.read_text() == guide.markdown()


# completion


def completed(tmp_path: Path, line: str) -> set[str]:
    """What a real bash offers behind this line."""
    script = tmp_path / "completion.bash"
    words = line.split(" ")
    program = (
        f"source {script}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; "
        '_distensor; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "completion.bash").write_text(said(capsys, "completion", "bash"))
    return tmp_path


def test_bash_completes_commands_words_and_options(scripts: Path) -> None:
    assert completed(scripts, "distensor ") >= BY_NAME.keys()
    assert completed(scripts, "distensor pa") == {"pause"}
    assert completed(scripts, "distensor auth lo") == {"login", "logout"}
    assert completed(scripts, "distensor --socket pause li") == {"limits"}
    assert completed(scripts, "distensor pause --f") == {"--for"}
    assert completed(scripts, "distensor --rep") == {"--replay"}
    assert completed(scripts, "distensor status x") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_know_every_command(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = said(capsys, "completion", shell)
    for verb in VERBS:
        assert re.search(rf"(^| |')(-a )?{verb.name}[ :)]", script, re.MULTILINE), verb.name
        assert all(word in script for word in verb.words)
    assert script.count("'") % 2 == 0
    found = shutil.which(shell)
    if found is not None:  # where the shell is installed, it has to read its script without running it
        (tmp_path / "script").write_text(script)
        done = subprocess.run(
            [found, "-n", tmp_path / "script"], capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_completion_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(said(capsys, "completion", "fish", "--json"))
    assert value["script"].startswith("# fish completion")


# logs


def events(*texts: str) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


@pytest.mark.parametrize(
    ("seen", "now", "new"),
    [
        ("ab", "abc", "c"),
        ("abc", "bcd", "d"),
        ("abc", "abc", ""),
        ("", "ab", "ab"),
        ("ab", "cd", "cd"),
        ("aa", "aaa", "a"),
        ("aab", "abab", "ab"),
    ],
)
def test_only_new_events_are_followed(seen: str, now: str, new: str) -> None:
    assert list(fresh(events(*seen), events(*now))) == events(*new)
