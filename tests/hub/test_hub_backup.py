"""A backup is the whole hub, of one moment; damaged ones leave nothing behind; both databases read both."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from postgres_kit import PostgresServer
from test_hub_metering import NODES, claim, earned, fill, receive, unit

from distensor.comm.keys import KeyKind
from distensor.core.errors import StoreError
from distensor.hub import stores
from distensor.hub.administration import Clerk, add_account, create_key, set_disabled
from distensor.hub.repository import Books, Store
from distensor.hub.stores.address import Database, DatabaseAddress
from distensor.hub.stores.archives import open_archive
from distensor.hub.stores.backup import BackedUp, restore, write_backup
from distensor.hub.stores.opening import open_store

CLERK = Clerk(actor="test", now=100)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Database:
    return tmp_path / "state" / "hub.sqlite" if request.param == "sqlite" else postgres.new_database()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "authority.pem").write_bytes(b"a key\0 of bytes")
    (folder / "lock").touch()
    return folder


def back_up(database: Database, state: Path, target: Path) -> BackedUp:
    with closing(open_archive(database)) as archive:
        return write_backup(archive, state, target)


def access_of(books: Books) -> object:
    keys = books.list_keys()
    assert len(keys) == 1
    return books.accounts(), keys, books.audit(10), books.access_version()


def work(store: Store) -> None:
    fill(store)
    claim(store, unit(0), unit(1))
    receive(store, unit(0))
    with store.transaction() as books:
        books.begin_generation()
        add_account(books, CLERK, "lab", frozenset({KeyKind.TRAINER}))
        create_key(books, CLERK, "lab", KeyKind.TRAINER)


@pytest.mark.parametrize("into", ["sqlite", "postgresql"])
def test_what_was_backed_up_is_a_hub_again_in_either_database(
    database: Database, state: Path, tmp_path: Path, postgres: PostgresServer, into: str
) -> None:
    file, new_state = tmp_path / "backup", tmp_path / "new"
    with closing(open_store(database)) as store:
        work(store)
        done = back_up(database, state, file)  # while it is in use
        with store.reading() as books:
            before, access = books.snapshot(), access_of(books)
        claim(store, unit(9))  # after the moment of the backup
    assert file.stat().st_mode & 0o777 == 0o600
    target: Database = new_state / "hub.sqlite" if into == "sqlite" else postgres.new_database()
    assert restore(file, new_state, lambda: open_archive(target)) == done
    assert (new_state / "authority.pem").read_bytes() == b"a key\0 of bytes"
    assert not (new_state / "lock").exists()
    with closing(open_store(target)) as store:
        with store.reading() as books:
            assert (books.snapshot(), access_of(books)) == (before, access)
        receive(store, unit(0), unit(1))
        assert earned(store, NODES[0]).confirmed_micro == 8000
        with store.transaction() as books:
            assert books.begin_generation() == 2
            set_disabled(books, CLERK, "lab", disabled=True)
            assert [line.number for line in books.audit(10)] == [3, 2, 1], "lines are counted on"


def test_a_backup_that_is_damaged_anywhere_leaves_nothing_behind(tmp_path: Path, state: Path) -> None:
    database, file = state / "hub.sqlite", tmp_path / "backup"
    with closing(open_store(database)) as store:
        work(store)
    back_up(database, state, file)
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    whole = file.read_bytes()
    damaged = {
        "short": gzip.compress(b"".join(lines[:-1])),
        "row": gzip.compress(b"".join(line.replace(b"n_a", b"n_x") for line in lines)),
        "gone": gzip.compress(b"".join([*lines[:4], *lines[5:]])),
        "cut": whole[: len(whole) // 2],
        "other": b"no backup at all",
        "newer": gzip.compress(lines[0].replace(b'"v":1', b'"v":2') + b"".join(lines[1:])),
        "outside": gzip.compress(b"".join(line.replace(b"authority.pem", b"../authority") for line in lines)),
    }
    for name, data in damaged.items():
        bad, new_state = tmp_path / name, tmp_path / f"state-{name}"
        bad.write_bytes(data)
        with pytest.raises(StoreError, match=name):
            restore(bad, new_state, lambda new_state=new_state: open_archive(new_state / "hub.sqlite"))
        assert not new_state.exists()


def test_nothing_that_is_there_is_overwritten(tmp_path: Path, state: Path) -> None:
    database, file = state / "hub.sqlite", tmp_path / "backup"
    open_store(database).close()
    back_up(database, state, file)
    with pytest.raises(StoreError, match="already"):
        back_up(database, state, file)
    with pytest.raises(StoreError, match="not empty"):
        restore(file, state, lambda: open_archive(database))


def test_a_backup_that_fails_midway_says_so_and_leaves_no_part_of_itself(
    database: Database, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part would be a file with the authority's key in it."""
    with closing(open_store(database)) as store:
        work(store)
    with closing(open_archive(database)) as archive:
        monkeypatch.setattr(type(archive), "_columns", lambda *_: ("no_such_column",))
    with pytest.raises(StoreError, match="no_such_column"):
        back_up(database, state, tmp_path / "backup")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path, state: Path) -> None:
    (state / "hub.sqlite").write_bytes(b"some other file " * 100)
    with pytest.raises(StoreError, match=r"hub\.sqlite.*not a database"):
        back_up(state / "hub.sqlite", state, tmp_path / "backup")


@pytest.mark.parametrize("opened", [open_store, open_archive])
def test_without_the_driver_the_missing_package_is_named(
    opened: Callable[[Database], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "distensor.hub.stores.postgres", raising=False)
    monkeypatch.delattr(stores, "postgres", raising=False)
    with pytest.raises(StoreError, match=r"psycopg.*pip install 'distensor\[cloud\]'"):
        opened(DatabaseAddress(host="", port=1, user="", name="hub"))
