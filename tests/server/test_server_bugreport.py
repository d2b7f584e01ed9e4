"""The redactor and the bug report, with secrets planted in everything that goes in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import StoreError
from distensor_server.bugreport import LONGEST_LOG, Entry, gather, pack, redacted
from distensor_server.redact import MARK, Redactor, is_secret_name, redact_keys

KEY = "dtj_" + "eyJhIjoi" * 6 + "0a1b2c3d"
ACCOUNT = "dt_p_" + "Zx9" * 12
PEM = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIB\nAwEHoUQDQg\n-----END EC PRIVATE KEY-----"
REDACTOR = Redactor(home="/home/annabel", user="annabel", known=("hunter2-hunter2",))

PLANTS = [
    (KEY, KEY),
    (f"join with {ACCOUNT}, please", ACCOUNT),
    (PEM, "MHcCAQEEIB"),
    (PEM.replace("\n", "\\n"), "MHcCAQEEIB"),
    (PEM[:60], "MHcCAQEEIB"),
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    ('{"authorization": "Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
    ("('authorization', 'Bearer node.n_1.verysecretword')", "verysecretword"),
    ("proxy http://ann:s3cretpw@proxy:3128 in the way", "s3cretpw"),
    ("HF_TOKEN=hf_abcdefgh", "hf_abcdefgh"),
    ('password = "correct horse battery"', "correct horse"),
    ('{"secret": "abcd efgh", "x": 1}', "abcd efgh"),
    ('text \\"api_key\\": \\"wxyz1234\\"', "wxyz1234"),
    ("API_KEY: 12345678", "12345678"),
    ("it says hunter2-hunter2 here", "hunter2-hunter2"),
    ("/home/annabel/.config/distensor", "annabel"),
    ("owner annabel@atlas-3", "annabel"),
]


@pytest.mark.parametrize(("text", "secret"), PLANTS)
def test_a_planted_secret_is_gone_and_stays_gone(text: str, secret: str) -> None:
    once = REDACTOR.text(text)
    assert secret not in once
    assert REDACTOR.text(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "connected to hub.example:50051 at 192.168.1.20",
        "step 4812 tokens 16384 tok/s 4812.5",
        "rank 2 exited 137 (out of memory) at 14:02:07",
        "/usr/lib/python3.11/site-packages/torch",
        "the hub does not know this join token",
        "/home/annabella/x",
    ],
)
def test_what_helps_is_kept(text: str) -> None:
    assert REDACTOR.text(text) == text


def test_addresses_are_taken_out_when_wanted() -> None:
    hiding = Redactor(hide_addresses=True)
    text = "14:02:07 192.168.1.20:50051 and fe80::1%eth0 and 2001:db8::7, not 127.0.0.1"
    assert hiding.text(text) == "14:02:07 ADDRESS:50051 and ADDRESS and ADDRESS, not 127.0.0.1"


@settings(max_examples=60, deadline=None)
@given(
    before=st.text(max_size=20),
    key=st.from_regex(re.compile(r"(dtj|dt_[a-z]{1,3})_[A-Za-z0-9_\-]{8,60}", re.ASCII), fullmatch=True),
    after=st.sampled_from(["", " ", "\n", '"', "'", ",", "}", "\\n", ")"]),
)
def test_no_key_survives_whatever_stands_around_it(before: str, key: str, after: str) -> None:
    text = f"{before}{key}{after}"
    assert key not in REDACTOR.text(text)
    assert key not in redact_keys(text)
    assert key not in json.dumps(redacted(REDACTOR, {text: [text, {"a": text}]}))


def test_variables_of_secret_names_lose_their_values() -> None:
    shown = REDACTOR.environment({"DISTENSOR_API_KEY": "plain", "PATH": "/home/annabel/bin", "AWS_SECRET": ""})
    assert shown == {"AWS_SECRET": "", "DISTENSOR_API_KEY": MARK, "PATH": "~/bin"}
    assert is_secret_name("GITHUB_TOKEN")
    assert not is_secret_name("LANG")


def test_members_of_secret_names_lose_their_text_only() -> None:
    value = {"secret": "abc", "tokens": 5, "nested": [{"api_key": "x"}], "name": "atlas"}
    assert redacted(REDACTOR, value) == {"secret": MARK, "tokens": 5, "nested": [{"api_key": MARK}], "name": "atlas"}


# the report


def planted(tmp_path: Path) -> dict[str, Any]:
    """Inputs with a secret in each."""
    state, config = tmp_path / "state", tmp_path / "config"
    (state / "logs").mkdir(parents=True)
    config.mkdir()
    (state / "server.log").write_text(f"joined with {KEY}\n{PEM}\nfor annabel\n")
    (state / "logs" / "w-1.log").write_text(f"Authorization: Bearer {ACCOUNT}\n")
    (state / "credential.json").write_text(json.dumps({"secret": "credential-secret"}))
    (tmp_path / "elsewhere").write_text("linked-secret")
    (state / "logs" / "link.log").symlink_to(tmp_path / "elsewhere")
    (config / "server.toml").write_text(f'cpu_workers = 2\npassword = "toml-secret"\n# {KEY}\n')
    return {
        "facts": {"python": "3.12"},
        "environment": {"DISTENSOR_API_KEY": KEY, "HOME": "/home/annabel"},
        "checks": [{"check": "key", "finding": f"it is {KEY}"}],
        "sections": {"hub": {"error": {"message": f"refused {KEY}"}}, "events": [{"text": ACCOUNT}]},
        "settings": [config / "server.toml", config / "none.toml"],
        "state": state,
    }


SECRETS = (KEY, ACCOUNT, "MHcCAQEEIB", "credential-secret", "linked-secret", "toml-secret", "annabel")


def test_no_planted_secret_is_in_the_archive(tmp_path: Path) -> None:
    entries = gather(REDACTOR, **planted(tmp_path))
    path = tmp_path / "report.tar.gz"
    pack(entries, path, at=1e9)
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        texts = [str(archive.extractfile(member).read()) for member in members]  # type: ignore[union-attr]
    names = {member.name.removeprefix("distensor-bugreport/") for member in members}
    assert names == {
        "versions.json",
        "environment.json",
        "doctor.json",
        "sections.json",
        "settings/server.toml",
        "logs/server.log",
        "logs/w-1.log",
    }
    everything = "".join(texts) + str([(m.name, m.uname, m.gname) for m in members])
    assert [secret for secret in SECRETS if secret in everything] == []
    assert "cpu_workers = 2" in everything
    assert {(m.uname, m.uid) for m in members} == {("", 0)}


def test_of_a_long_log_the_end_goes_in_from_a_whole_line_on(tmp_path: Path) -> None:
    inputs = planted(tmp_path)
    line = f"{KEY}\n"
    (tmp_path / "state/server.log").write_text(line * (LONGEST_LOG // len(line) + 50) + "the end\n")
    (log,) = [entry for entry in gather(REDACTOR, **inputs) if entry.name == "logs/server.log"]
    assert log.content.endswith(b"the end\n")
    assert KEY[20:] not in log.content.decode()


def test_nothing_of_anybodys_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(StoreError, match="cannot write"):
        pack([Entry(name="a", about="", content=b"x")], tmp_path / "mine", at=0)
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_command_lists_and_writes_and_leaks_nothing(tmp_path: Path) -> None:
    state = planted(tmp_path)["state"]
    key = tmp_path / "config/distensor/api_key"
    key.parent.mkdir(parents=True)
    key.write_text(KEY)
    key.chmod(0o644)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "DISTENSOR_API_KEY": ACCOUNT,
        "DISTENSOR_SOCKET": str(tmp_path / "s.sock"),
        "SOME_PASSWORD": "environment-secret",
    }
    program = (
        "import sys; from distensor_server.doctor import checks; from distensor_server.verbs import bugreport; "
        "quick = [s for s in checks.STEPS if s.name not in ('torch', 'devices')]; examine = checks.examine; "
        "bugreport.examine = lambda world, monotonic: examine(world, monotonic, quick); "
        "sys.exit(bugreport.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "--state", str(state), "--output", str(tmp_path / "out.tar.gz")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "This goes into the report:" in done.stdout
    assert "logs/server.log" in done.stdout
    assert "nothing was sent" in done.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        everything = "".join(archive.extractfile(m).read().decode() for m in archive)  # type: ignore[union-attr]
    found = [secret for secret in (*SECRETS[:-1], "environment-secret", str(tmp_path)) if secret in everything]
    assert found == []
    again = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert (again.returncode, json.loads(again.stdout)["error"]["code"]) == (73, "not_kept")
