"""The SQLite books: durable settings, guards inside the database, versions."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from test_hub_metering import JOB, NODES, claim, fill, receive, unit

from distensor.comm.tokens import Role
from distensor.core.control import JobState, WorkerState
from distensor.core.errors import StoreError
from distensor.core.ids import NodeId
from distensor.hub.access import token_for
from distensor.hub.hashing import hash_secret
from distensor.hub.metering import Posting
from distensor.hub.repository import Books, Store
from distensor.hub.stores.sqlite import SqliteStore
from distensor.testing.hub_store import MemoryStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hub.sqlite"


def ledger(path: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT account, amount FROM entries ORDER BY entry_id").fetchall()


def test_commits_are_on_the_disk_and_private(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_unit_is_two_entries_that_sum_to_zero(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        fill(store)
        claim(store, unit(0), unit(1))
        receive(store, unit(0), unit(1), unit(1))
    assert ledger(path) == [("pending:n_a", 4000), ("platform", -4000)] * 2


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE entries SET amount = 1", "append-only"),
        ("DELETE FROM entries", "append-only"),
        ("INSERT INTO entries SELECT NULL, job_id, epoch, step, rank, account, 5, 0 FROM entries LIMIT 1", "UNIQUE"),
        ("UPDATE jobs SET epoch = 1", "never falls"),
        ("UPDATE meta SET value = 0", "never falls"),
        ("INSERT INTO units VALUES ('j_none', 1, 1, 1, 'n_a', 'claimed', 1, NULL)", "FOREIGN KEY"),
    ],
)
def test_the_database_itself_refuses(path: Path, statement: str, why: str) -> None:
    with closing(SqliteStore(path)) as store:
        fill(store)
        with store.transaction() as books:
            books.begin_generation()
        claim(store, unit(0))
        receive(store, unit(0))
        before = ledger(path)
        with pytest.raises(StoreError, match=why), store.transaction():
            store._connection.execute(statement)
        assert ledger(path) == before


def test_a_posting_that_comes_twice_is_refused_by_the_database(path: Path) -> None:
    """Should the logic above it ever fail: the unique key holds."""
    posting = Posting(key=unit(0).key, owner="main", node_id=NODES[0], amount=1000, hour=1)
    with closing(SqliteStore(path)) as store:
        fill(store)
        with store.transaction() as books:
            books.post([posting])
        with pytest.raises(StoreError, match="UNIQUE"), store.transaction() as books:
            books.post([posting])
        with store.transaction() as books:
            assert books.earnings(NODES[0]).confirmed_micro == 1000


def test_generations_only_rise(path: Path) -> None:
    seen = []
    for _ in range(3):
        with closing(SqliteStore(path)) as store, store.transaction() as books:
            seen.append(books.begin_generation())
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_what_was_saved_is_loaded(path: Path, kind: str) -> None:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(path)
    with closing(store):
        fill(store)
        with store.transaction() as books:
            job = books.snapshot().jobs[0]
        ready = replace(
            job.ranks[1], port=41_000, certificate_pem="pem", state=WorkerState.READY, restarts=2, reason="x"
        )
        finished = replace(job, state=JobState.FINISHED, reason="done").with_rank(ready)
        with store.transaction() as books:
            books.save_rank(job.job_id, job.epoch, ready)
            books.update_job(finished)
        with store.transaction() as books:
            snapshot = books.snapshot()
    assert snapshot.jobs == (finished,)
    assert snapshot.submissions == {("main", "s"): (JOB, 2)}
    assert [node.node_id for node in snapshot.nodes] == list(NODES)


def _save_and_fail(books: Books, secret: str) -> None:
    books.save_token(token_for(secret, Role.NODE, "node"))
    raise ZeroDivisionError


def test_a_transaction_that_fails_leaves_nothing(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        with pytest.raises(ZeroDivisionError), store.transaction() as books:
            _save_and_fail(books, "secret" * 5)
        with store.transaction() as books:
            assert books.find_token(hash_secret("secret" * 5)) is None


def test_a_part_that_fails_takes_only_itself_back(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        with store.transaction() as books:
            books.save_token(token_for("first-secret", Role.NODE, "node"))
            with pytest.raises(ZeroDivisionError), store.part():
                _save_and_fail(books, "second-secret")
        with store.transaction() as books:
            assert books.find_token(hash_secret("first-secret")) is not None
            assert books.find_token(hash_secret("second-secret")) is None


def test_no_secret_is_in_the_file(path: Path) -> None:
    with closing(SqliteStore(path)) as store, store.transaction() as books:
        books.save_token(token_for("a-secret-of-some-length", Role.NODE, "node"))
    for file in path.parent.iterdir():
        assert b"a-secret-of-some-length" not in file.read_bytes()


def test_a_newer_version_is_refused_by_name(path: Path) -> None:
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=r"version 99, this hub knows up to \d+.*newer disTensor"):
        SqliteStore(path)


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"this is not a database, but long enough to look at" * 100)
    with pytest.raises(StoreError, match=r"hub\.sqlite: file is not a database"):
        SqliteStore(path)


def test_a_spent_token_stays_spent(path: Path) -> None:
    with closing(SqliteStore(path)) as store:
        fill(store)
        token = replace(token_for("one-secret", Role.NODE, "node"), used_by=NodeId("n_a"))
        with store.transaction() as books:
            books.save_token(token)
            books.spend_token(NodeId("n_a"))
        with store.transaction() as books:
            assert books.find_token(token.secret_hash) == replace(token, spent=True)
