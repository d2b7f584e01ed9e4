"""`python -m distensor hub`: what the operator sees, and the statuses of the shell."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hub_kit import HubProcess

from distensor.comm import HubClient
from distensor.comm.address import HubAddress
from distensor.comm.tokens import Role, decode_token
from distensor.core.ids import Generation
from distensor.hub import cli
from distensor.hub.app import Ready


def hub(*options: str, state: Path, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return verb("hub", "--state", str(state), *options, timeout=timeout)


def verb(*words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distensor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def fails(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_without_a_verb_the_verbs_are_listed() -> None:
    result = verb()
    assert result.returncode == 0
    assert "\n  hub\n" in result.stdout


def test_an_unknown_verb_lists_the_known_ones() -> None:
    fails(verb("hubb"), 64, "no verb 'hubb'", "\n  hub\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "nowhere"], ["'nowhere'", "host:port"]),
        (["--listen", "127.0.0.1:99999"], ["99999"]),
        (["--listen", "127.0.0.1:auto"], ["auto"]),
        (["--node-tokens", "many"], ["'many'", "whole number"]),
        (["--node-tokens", "-1"], ["-1"]),
        (["--colour"], ["--colour"]),
        (["extra"], ["extra"]),
    ],
)
def test_a_flag_that_is_wrong_is_named(tmp_path: Path, options: Sequence[str], words: Sequence[str]) -> None:
    fails(hub(*options, state=tmp_path / "s"), 64, *words, "--help")
    assert not (tmp_path / "s").exists()


def test_help_is_no_error() -> None:
    result = verb("hub", "--help")
    assert result.returncode == 0
    assert "--listen" in result.stdout


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        fails(hub("--listen", address, state=tmp_path / "s"), 69, address, "taken", "--listen")


def test_a_host_of_another_machine_is_named(tmp_path: Path) -> None:
    fails(hub("--listen", "192.0.2.7:0", state=tmp_path / "s"), 69, "192.0.2.7")


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fails(hub("--listen", "127.0.0.1:0", state=tmp_path / "file" / "s"), 73, "file/s", "writable")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_directory_that_is_read_only_is_named(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o500)
    fails(hub("--listen", "127.0.0.1:0", state=tmp_path / "s"), 73, "Permission denied", "writable")


def test_a_state_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    HubProcess(tmp_path / "s").stop()
    with closing(sqlite3.connect(tmp_path / "s" / "hub.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 77")
    fails(hub("--listen", "127.0.0.1:0", state=tmp_path / "s"), 73, "version 77", "newer disTensor")


def test_a_second_hub_on_the_same_state_is_refused(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s")
    try:
        fails(hub("--listen", "127.0.0.1:0", state=tmp_path / "s"), 73, "another hub is running")
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(tmp_path: Path, number: int) -> None:
    running = HubProcess(tmp_path / "s")
    running.process.send_signal(number)
    assert running.stop() == 0


def test_it_ends_with_its_standard_input_when_asked_to(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s")
    assert running.process.stdin is not None
    running.process.stdin.close()
    assert running.process.wait(timeout=10) == 0
    running.stop()


@pytest.mark.parametrize(
    ("host", "relay", "told"), [("127.0.0.1", "", False), ("192.0.2.1", "", True), ("192.0.2.1", "192.0.2.1:5", False)]
)
def test_how_to_start_a_relay_is_told_where_there_is_none(host: str, relay: str, told: bool) -> None:
    ready = Ready(
        address=HubAddress(host=host, port=50051),
        node_tokens=(),
        trainer_token="t",
        generation=Generation(1),
        fingerprint="ab" * 32,
        known_nodes=0,
        live_jobs=0,
        relay=relay,
    )
    line = f"distensor relay --listen 0.0.0.0:50052 --hub {host}:50051 --authority {'ab' * 32}"
    assert (line in cli.ready_text(ready)) is told


def test_the_one_line_of_json(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s", tokens=2)
    assert running.stop() == 0
    ready = running.ready
    assert list(ready) == [
        "v",
        "event",
        "address",
        "node_tokens",
        "trainer_token",
        "generation",
        "authority_fingerprint",
    ]
    assert (ready["v"], ready["event"], ready["generation"]) == (1, "ready", 1)
    for text, role in [(ready["trainer_token"], Role.TRAINER), *((text, Role.NODE) for text in ready["node_tokens"])]:
        token = decode_token(text)
        assert (token.role, str(token.address), token.fingerprint) == (
            role,
            ready["address"],
            ready["authority_fingerprint"],
        )


def test_a_restart_keeps_authority_and_trainer_token_and_raises_the_generation(tmp_path: Path) -> None:
    first = HubProcess(tmp_path / "s", tokens=1)
    first.kill()
    second = first.restart()
    assert second.stop() == 0
    assert second.ready["generation"] == 2
    assert second.ready["trainer_token"] == first.ready["trainer_token"]
    assert second.ready["authority_fingerprint"] == first.ready["authority_fingerprint"]
    assert second.ready["node_tokens"] == []


def test_the_first_run_teaches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distensor", "hub", "--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--exit-with-stdin"], stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("Both are secrets")):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        process.communicate("", timeout=20)
        assert process.returncode == 0
    text = "".join(lines)
    assert "disTensor hub at 127.0.0.1:" in text
    keys = [line.strip() for line in lines if line.startswith("dtj_")]
    assert [decode_token(key).role for key in keys] == [Role.NODE, Role.TRAINER]  # each alone on its line
    assert "DISTENSOR_API_KEY=dtj_... distensor-server run" in text
    assert "--listen 0.0.0.0:50051" in text
    assert 'ds.init(mode="hub") and is started with DISTENSOR_TOKEN' in text


def test_tokens_can_be_made_while_the_hub_runs(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s")
    try:
        result = verb("hub", "token", "--state", str(tmp_path / "s"), "--count", "2", "--json")
        assert result.returncode == 0, result.stderr
        tokens = json.loads(result.stdout)["node_tokens"]
        assert len({decode_token(token).secret for token in tokens}) == 2
        assert str(decode_token(tokens[0]).address) == running.ready["address"]
        with HubClient(running.ready["trainer_token"]) as client:
            assert client.query_mesh().generation == 1
    finally:
        assert running.stop() == 0


def test_tokens_for_a_hub_that_never_ran_are_refused(tmp_path: Path) -> None:
    fails(verb("hub", "token", "--state", str(tmp_path / "none")), 73, "no hub has been started")
    assert not (tmp_path / "none").exists()


def test_secrets_are_in_no_command_line_and_no_log(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s", tokens=1)
    cmdline = Path(f"/proc/{running.process.pid}/cmdline")
    seen = cmdline.read_bytes().decode() if cmdline.exists() else ""
    assert running.stop() == 0
    for text in (running.ready["trainer_token"], *running.ready["node_tokens"]):
        for where in (seen, running.log()):
            assert text not in where
            assert decode_token(text).secret not in where
    for file in (tmp_path / "s").iterdir():
        assert file.stat().st_mode & 0o077 == 0 or file.suffix in {".sqlite-wal", ".sqlite-shm"}, file


def test_a_hub_is_kept_and_brought_back_by_command(tmp_path: Path) -> None:
    running = HubProcess(tmp_path / "s", tokens=1)
    try:
        kept = verb("hub", "backup", "--state", str(tmp_path / "s"), "--json", str(tmp_path / "b"))
    finally:
        assert running.stop() == 0
    brought = verb("hub", "restore", "--state", str(tmp_path / "s2"), "--json", str(tmp_path / "b"))
    assert (kept.returncode, brought.returncode) == (0, 0), kept.stderr + brought.stderr
    assert json.loads(kept.stdout) == json.loads(brought.stdout)
    again = HubProcess(tmp_path / "s2")
    try:
        assert again.ready["authority_fingerprint"] == running.ready["authority_fingerprint"]
        assert again.ready["generation"] == 2
    finally:
        assert again.stop() == 0
    restored = verb("hub", "restore", "--state", str(tmp_path / "s2"), str(tmp_path / "b"))
    fails(restored, 73, "not empty")


def test_a_password_in_the_databases_url_is_refused(tmp_path: Path) -> None:
    refused = hub("--database", "postgresql://me:geheim@host/books", state=tmp_path / "s")
    fails(refused, 64, "DISTENSOR_DATABASE_PASSWORD")
    assert "geheim" not in refused.stderr
