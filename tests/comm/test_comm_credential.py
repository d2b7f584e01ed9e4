"""The node's identity on disk."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from distensor.comm.credential import NodeCredential, load_credential, save_credential
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import StoreError
from distensor.core.ids import NodeId
from distensor.hub.pki import Authority


@pytest.fixture
def credential(tmp_path: Path) -> NodeCredential:
    (tmp_path / "hub").mkdir()
    authority = Authority.load_or_create(tmp_path / "hub", SYSTEM_CLOCK)
    return NodeCredential(
        node_id=NodeId("n_1"),
        address="127.0.0.1:1",
        authority_pem=authority.authority_pem,
        secret="the-secret",
    )


def test_it_survives_the_file_which_only_the_owner_can_read(tmp_path: Path, credential: NodeCredential) -> None:
    path = tmp_path / "deep" / "credential.json"
    save_credential(path, credential)
    assert load_credential(path) == credential
    of_two = replace(credential, others=("127.0.0.1:2", "[::1]:3"))
    save_credential(path, of_two)
    assert load_credential(path) == of_two
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["credential.json"]


def test_there_may_be_no_file(tmp_path: Path) -> None:
    assert load_credential(tmp_path / "none") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"version": 2}', '{"version": 1, "node_id": "../x"}', "\x00"]
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "credential.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"credential\.json is damaged"):
        load_credential(path)


def test_every_truncation_is_noticed(tmp_path: Path, credential: NodeCredential) -> None:
    path = tmp_path / "credential.json"
    save_credential(path, credential)
    whole = path.read_bytes()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            load_credential(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, credential: NodeCredential) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        save_credential(tmp_path / "file" / "credential.json", credential)


def test_the_secret_is_not_in_the_representation(credential: NodeCredential) -> None:
    assert "the-secret" not in repr(credential)
