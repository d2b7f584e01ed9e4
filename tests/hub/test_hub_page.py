"""The page for operators, docs/hub.md, walked from top to bottom on one hub: every command, as it is written there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hub_kit import HubProcess, spec

from distensor.cloud.cli import cloud_parser
from distensor.comm import HubClient
from distensor.comm.keys import decode_key
from distensor.hub import cli, jobs_cli
from distensor.hub.cli import hub_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/hub.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
SERVES = [words for words in COMMANDS if words[:2] == ["distensor", "hub"] and len(words) > 2 and words[2][0] == "-"]
ASKS = [words for words in COMMANDS if words not in SERVES]
NO_SUCH_PAYOUT = "po_0123456789abcdef0123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """At the place where commands look that are told no other."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("DISTENSOR_TOKEN", "DISTENSOR_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "distensor").mkdir()
    process = HubProcess(tmp_path / "distensor" / "hub")
    yield process
    assert process.stop() == 0


def test_there_are_commands() -> None:
    assert len(SERVES) >= 3
    assert len(ASKS) > 15


@pytest.mark.parametrize("words", SERVES, ids=" ".join)
def test_a_hub_is_started_by_what_the_page_says(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken apart only: what is written there is an address of somebody else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub.toml").write_text((ROOT / "installers/hub/hub.toml").read_text())
    options = hub_parser().options(words[2:])
    assert cli.config_of(options).listen.port == 50051
    if "--config" in words:
        assert cloud_parser().options(words[2:]).listen == options.listen


def test_the_walk_of_an_operator(hub: HubProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with HubClient(hub.ready["trainer_token"]) as client:
        job_id, _ = client.submit_job(replace(spec(), wait=True))
    for words in ASKS:
        assert words[0] == "distensor"
        main = {"hub": cli.main, "jobs": jobs_cli.main}[words[1]]
        status = main([job_id if word == "JOB" else word for word in words[2:]])
        printed = capsys.readouterr()
        if NO_SUCH_PAYOUT in words:
            assert status != 0
            assert NO_SUCH_PAYOUT in printed.err, words
        elif words[2:4] == ["payout", "make"]:  # nobody has worked for this account yet
            assert (status, "ann" in printed.out + printed.err) in ((0, True), (64, True)), (words, printed)
        else:
            assert (status, printed.err) == (0, ""), (words, printed)
            assert printed.out.strip(), words


def test_what_the_page_says_of_keys_and_states_is_so(hub: HubProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["account", "add", "ann", "--provider"], ["key", "create", "ann", "--kind", "provider"]):
        assert cli.main(words) == 0
    printed = capsys.readouterr().out
    key = re.search(r"dt_p_\w+", printed)
    assert key is not None, "a key is printed once"
    assert decode_key(key[0]) == "provider"
    assert "dtj_" in printed, "together with a token that has the hub's address"
    assert cli.main(["key", "list"]) == 0
    listed = capsys.readouterr().out
    assert key[0] not in listed
    assert key[0][:12] in listed, "the books keep the first twelve characters"
    assert cli.main(["token", "--account", "ann"]) == 0
    assert capsys.readouterr().out.startswith("dtj_")
    assert cli.main(["account", "disable", "ann"]) == 0
    assert cli.main(["token", "--account", "ann"]) == 64


def test_files_and_jobs_that_the_page_names_are_there() -> None:
    for path in re.findall(r"`(installers/hub/[\w.-]+)`", PAGE):
        assert (ROOT / path).is_file() or path.endswith("database.password"), path
    jobs = re.findall(r"^([a-z-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"`make ([a-z-]+)`", PAGE)
    assert len(named) >= 5
    assert set(named) <= set(jobs)
