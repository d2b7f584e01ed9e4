"""`distensor cloud` as an operator starts it: a process, its sockets, its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cloud_kit import Client

from distensor.cloud.cli import main
from distensor.comm import HubClient
from distensor.comm.address import parse_address

Run = Callable[..., "CompletedProcess[str]"]
CLOUD = (sys.executable, "-c", "import sys; from distensor.cloud.cli import main; sys.exit(main(sys.argv[1:]))")


@contextmanager
def cloud(state: Path, *options: str) -> Iterator[dict[str, Any]]:
    """What the process says once it is ready; it ends with 0 when it is told to."""
    command = [*CLOUD, "--state", str(state), "--listen", "127.0.0.1:0", "--json", "--exit-with-stdin", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.wait(20)
        try:
            yield json.loads(line)
        finally:
            process.terminate()
        assert process.wait(20) == 0


def client_of(ready: dict[str, Any], key: str = "") -> Client:
    return Client(parse_address(ready["http"].removeprefix("http://")), key)


def admin_key(run: Run, state: Path) -> str:
    """Made by the operator on the hub's own machine, as the first key has to be."""
    hub = [sys.executable, "-m", "distensor", "hub"]
    run([*hub, "account", "add", "ops", "--admin", "--state", state])
    made = run([*hub, "key", "create", "ops", "--kind", "admin", "--json", "--state", state])
    return str(json.loads(made.stdout)["secret"])


def test_an_operator_starts_it_and_works_over_http(tmp_path: Path, run: Run) -> None:
    state = tmp_path / "state"
    with cloud(state, "--http", "127.0.0.1:0") as ready:
        assert client_of(ready).get("/v1/health/ready").json == {"status": "ready"}
        assert client_of(ready, ready["trainer_token"]).get("/v1/me").json["account"] == "main"
        admin = client_of(ready, admin_key(run, state))
        made = admin.post("/v1/accounts", {"account": "lab", "kinds": ["trainer"]})
        assert made.status == 201, made
        lab = admin.post("/v1/keys", {"account": "lab", "kind": "trainer"}).json
        with HubClient(lab["token"]) as trainer:  # the key that HTTP made opens the control plane
            assert trainer.query_mesh().nodes == ()
        assert client_of(ready, lab["secret"]).get("/v1/jobs").json == {"items": [], "next": None}
    with cloud(state, "--http", "127.0.0.1:0") as ready:
        assert [one["account"] for one in client_of(ready, admin.key).get("/v1/accounts").json["items"]] == [
            "lab",
            "main",
            "ops",
        ]
        mode = (state / "hub.sqlite").stat().st_mode & 0o777
        assert mode == 0o600


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--http", "0.0.0.0:8080"), "keys would travel unencrypted"),
        (("--tls-key", "x.pem"), "give both or none"),
        (("--cors-origin", "*"), "expected scheme://host"),
        (("--http", "nowhere"), "expected host:port"),
        (("--tls-key", "/nowhere/x", "--tls-certificate", "/nowhere/y"), "/nowhere/y"),
    ],
)
def test_what_cannot_be_meant_ends_it_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main(["--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *options]) == 64
    assert words in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0", "--http", where]) == 69
    assert f"cannot listen on {where}" in capsys.readouterr().err


def test_the_options_may_stand_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cloud.toml"
    file.write_text('http = "0.0.0.0:0"\nhttp-host = ["hub.example.org"]\n')
    assert main(["--state", str(tmp_path / "s"), "--listen", "127.0.0.1:0", "--config", str(file)]) == 64
    assert "keys would travel unencrypted" in capsys.readouterr().err
    file.write_text('htp = "127.0.0.1:0"\n')
    assert main(["--state", str(tmp_path / "s"), "--config", str(file)]) == 64
    assert "there is no option 'htp'" in capsys.readouterr().err
