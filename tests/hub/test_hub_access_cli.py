"""`distensor hub account`, `key`, `audit` and `token --account`, on the books of a real hub."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import HubProcess, WordNode, spec, until

from distensor.comm import HubClient, LinkState
from distensor.comm.keys import decode_key
from distensor.comm.tokens import decode_token
from distensor.core.control import JobState
from distensor.core.errors import AuthenticationError
from distensor.hub import cli, jobs_cli


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of a hub that has been started once."""
    process = HubProcess(tmp_path_factory.mktemp("template") / "hub")
    assert process.stop() == 0
    return process.state


@pytest.fixture
def state(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "hub")


@pytest.fixture
def hub(state: Path) -> Iterator[HubProcess]:
    process = HubProcess(state)
    yield process
    assert process.stop() == 0


class Desk:
    """The operator at the hub's machine."""

    def __init__(self, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state = state
        self._capsys = capsys

    def run(self, *words: str) -> tuple[int, str, str]:
        status = cli.main([*words, "--state", str(self.state)])
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err

    def json(self, *words: str) -> Any:
        status, out, err = self.run(*words, "--json")
        assert status == 0, err
        return json.loads(out)

    def fails(self, *words: str) -> str:
        status, out, err = self.run(*words)
        assert (status, out) == (64, "")
        return err


@pytest.fixture
def desk(state: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(state, capsys)


def test_an_account_from_its_first_key_to_its_end(desk: Desk) -> None:
    assert (
        "no keys yet: distensor hub key create rigs --kind provider"
        in desk.run("account", "add", "rigs", "--provider", "--trainer")[1]
    )
    made = desk.json("key", "create", "rigs", "--kind", "provider", "--label", "garage", "--days", "90")
    assert decode_key(made["secret"]).value == "provider"
    token = decode_token(made["token"])
    assert (token.role.value, token.secret) == ("node", made["secret"])
    listed = desk.json("key", "list", "rigs")["keys"]
    assert [(one["key"], one["label"], one["last_used_at"]) for one in listed] == [(made["key"]["key"], "garage", None)]
    assert made["secret"] not in desk.run("key", "list")[1]
    fresh = desk.json("key", "rotate", made["key"]["key"], "--hours", "1")
    assert fresh["secret"] != made["secret"]
    states = {one["key"]: one["state"] for one in desk.json("key", "list", "rigs")["keys"]}
    assert states[made["key"]["key"]].startswith("ends ")
    assert desk.json("key", "revoke", fresh["key"]["key"])["key"]["state"] == "revoked"
    assert desk.json("account", "disable", "rigs")["account"]["disabled"]
    text = desk.run("account", "list")[1]
    assert "rigs" in text
    assert "disabled" in text
    actions = [one["action"] for one in desk.json("audit")["entries"]]
    assert actions == ["account disable", "key revoke", "key rotate", "key create", "account add"]
    assert made["secret"] not in desk.run("audit")[1]
    assert [one["action"] for one in desk.json("audit", "-n", "1", "--before", "3")["entries"]] == ["key create"]


def test_a_key_that_was_found_somewhere_is_revoked_by_its_text_from_standard_input(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk.json("key", "create", "main", "--kind", "trainer")
    monkeypatch.setattr("sys.stdin", io.StringIO(made["secret"] + "\n"))
    assert desk.json("key", "revoke", "-")["key"]["key"] == made["key"]["key"]
    monkeypatch.setattr("sys.stdin", io.StringIO(made["secret"][:-1]))
    error = desk.fails("key", "revoke", "-")
    assert "incomplete or altered" in error
    assert made["secret"][12:-1] not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("account", "add", "x"), "--provider, --trainer, --admin"),
        (("account", "add", "two words", "--trainer"), "'two words'"),
        (("account", "disable", "nobody"), "no account 'nobody'"),
        (("key", "create", "nobody", "--kind", "trainer"), "no account 'nobody'"),
        (("key", "create", "main", "--kind", "admin"), "kind provider, trainer, not admin"),
        (("key", "create", "main", "--kind", "root"), "root"),
        (("key", "create", "main", "--kind", "trainer", "--scope", "nodes:join"), "of no use to a trainer key"),
        (("key", "revoke", "k_none"), "no key 'k_none'"),
        (("key", "list", "nobody"), "no account 'nobody'"),
        (("token", "--account", "nobody"), "no account 'nobody'"),
        (("audit", "-n", "many"), "'many'"),
        (("account",), "COMMAND"),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(desk: Desk, words: tuple[str, ...], said: str) -> None:
    assert said in desk.fails(*words)
    assert desk.json("audit")["entries"] == []


def test_a_directory_without_a_hub_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = Desk(tmp_path / "none", capsys).run("account", "list")
    assert (status, out) == (73, "")
    assert "no hub has been started" in err


def test_limits_are_kept_until_they_are_set_anew(desk: Desk) -> None:
    desk.json("account", "limit", "main", "--workers", "4", "--priority", "3")
    limits = desk.json("account", "limit", "main", "--waiting", "2", "--workers", "none")["account"]["limits"]
    assert limits == {"workers": None, "waiting": 2, "priority": 3}
    assert "any number of workers, 2 jobs in the queue, priority up to 3" in desk.run("account", "list")[1]


@pytest.mark.asyncio
@pytest.mark.usefixtures("hub")
async def test_what_the_operator_revokes_a_running_hub_shows_out(desk: Desk, tmp_path: Path) -> None:
    desk.json("account", "add", "rigs", "--provider", "--trainer")
    rig = desk.json("key", "create", "rigs", "--kind", "provider")
    user = desk.json("key", "create", "rigs", "--kind", "trainer", "--scope", "mesh:read")
    [join] = desk.json("token", "--account", "rigs")["node_tokens"]
    nodes = [WordNode("atlas", rig["token"], tmp_path / "a.json"), WordNode("bolt", join, tmp_path / "b.json")]
    linking = [asyncio.create_task(node.link.run()) for node in nodes]
    try:
        await until(lambda: all(node.connected for node in nodes))
        with HubClient(user["token"]) as client:
            assert len((await asyncio.to_thread(client.query_mesh)).nodes) == 2
            desk.json("key", "revoke", rig["key"]["key"])
            await until(lambda: nodes[0].link.status.state is LinkState.REJECTED)
            assert nodes[1].connected
            desk.json("account", "disable", "rigs")
            await until(lambda: nodes[1].link.status.state is LinkState.REJECTED)
            with pytest.raises(AuthenticationError, match="disabled"):
                await asyncio.to_thread(client.query_mesh)
    finally:
        for task in linking:
            task.cancel()
        await asyncio.gather(*linking, return_exceptions=True)
    used = {one["key"]: one["last_used_at"] for one in desk.json("key", "list")["keys"]}
    assert all(used.values())
    assert "authenticate" in {one["action"] for one in desk.json("audit")["entries"]}


def test_join_tokens_are_for_accounts_that_may_lend_machines_and_are_written_down(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(state, capsys)
    desk.json("account", "add", "rigs", "--provider")
    desk.json("account", "add", "lab", "--trainer")
    assert len(desk.json("token", "--account", "rigs", "--count", "2")["node_tokens"]) == 2
    newest = desk.json("audit")["entries"][0]
    assert (newest["actor"], newest["action"], newest["target"]) == ("operator", "token create", "rigs")
    assert "lends no machines" in desk.fails("token", "--account", "lab")
    desk.json("account", "disable", "rigs")
    assert "rigs is disabled" in desk.fails("token", "--account", "rigs")
    assert "no account 'gone'" in desk.fails("token", "--account", "gone")


def test_a_job_that_had_ended_is_not_called_cancelled(
    hub: HubProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTENSOR_TOKEN", raising=False)
    state = ["--state", str(hub.state)]
    with HubClient(hub.ready["trainer_token"]) as client:
        done, open_ = (client.submit_job(replace(spec(submission=name), wait=True))[0] for name in ("a", "b"))
        client.end_job(done, JobState.FINISHED)
    assert jobs_cli.main(["cancel", done, *state]) == 0
    assert capsys.readouterr().out == f"Job {done} had ended already: it is finished.\n"
    assert jobs_cli.main(["cancel", open_, *state]) == 0
    assert capsys.readouterr().out == f"Job {open_} is cancelled.\n"
    assert jobs_cli.main(["cancel", open_, "--json", *state]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"


def test_jobs_are_asked_of_the_hub_on_this_machine(
    hub: HubProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTENSOR_TOKEN", raising=False)
    state = ["--state", str(hub.state)]
    assert jobs_cli.main(["list", *state]) == 0
    assert capsys.readouterr().out == "No jobs.\n"
    assert jobs_cli.main(["list", "--json", "--ended", *state]) == 0
    assert json.loads(capsys.readouterr().out) == {"v": 1, "jobs": []}
    for word in ("show", "explain", "cancel"):
        assert jobs_cli.main([word, "j_none", *state]) == 69
        assert "the hub knows no job j_none" in capsys.readouterr().err
    monkeypatch.setenv("DISTENSOR_TOKEN", hub.ready["trainer_token"])
    assert jobs_cli.main(["list"]) == 0
    assert jobs_cli.main(["explain", "not an id"]) == 64
    monkeypatch.setenv("DISTENSOR_TOKEN", "dtj_none")
    assert jobs_cli.main(["list"]) == 77


def test_jobs_without_a_hub_say_which_variable_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTENSOR_TOKEN", raising=False)
    assert jobs_cli.main(["list", "--state", str(tmp_path)]) == 64
    assert "DISTENSOR_TOKEN" in capsys.readouterr().err
