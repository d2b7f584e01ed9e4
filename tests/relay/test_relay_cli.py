"""The command line of the relay: what it refuses, and with which status."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from transport_kit import Authority

from distensor.relay import cli

PRINT = "ab" * 32


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 64, "--hub"),
        (["--hub", "nowhere", "--authority", PRINT], 64, "expected host:port"),
        (["--hub", "127.0.0.1:1", "--authority", "ab"], 64, "64 hexadecimal digits"),
        (["--hub", "127.0.0.1:1", "--authority", PRINT, "--connections", "0"], 64, "every cap is above 0"),
        (["--hub", "127.0.0.1:1", "--authority", PRINT, "--rate", "-5"], 64, "every cap is above 0"),
        (["--help"], 0, ""),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == status
    assert words in capsys.readouterr().err


def test_without_its_hub_there_is_no_relay(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert cli.main(["--hub", f"127.0.0.1:{port}", "--authority", PRINT]) == 69
    assert f"no hub at 127.0.0.1:{port}" in capsys.readouterr().err


START = """
import sys
from pathlib import Path
from distensor.relay import cli
cli.fetch_authority = lambda hub, fingerprint, seconds: Path(sys.argv[1]).read_text()
sys.exit(cli.main(["--hub", "127.0.0.1:1", "--authority", "ab" * 32, "--listen", sys.argv[2], *sys.argv[3:]]))
"""


def test_it_says_where_it_listens_and_ends_with_its_input(
    tmp_path: Path, python: Callable[..., CompletedProcess[str]]
) -> None:
    (tmp_path / "authority.pem").write_text(Authority().pem)
    start = ["-c", START, str(tmp_path / "authority.pem")]
    done = python(*start, "127.0.0.1:0", "--json", "--exit-with-stdin")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["event"] == "ready"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = python(*start, f"127.0.0.1:{taken.getsockname()[1]}", "--exit-with-stdin")
    assert (refused.returncode, "cannot listen on" in refused.stderr) == (69, True)
