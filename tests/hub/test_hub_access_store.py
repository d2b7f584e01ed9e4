"""Accounts, keys, the audit log, and jobs that wait, in every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from access_kit import ALL_KINDS
from hub_kit import info, spec
from postgres_kit import PostgresServer
from test_hub_metering import JOB, NODES, fill

from distensor.comm.keys import KeyKind
from distensor.comm.tokens import Role
from distensor.core.control import DeviceKind, JobState
from distensor.core.ids import AccountId, Epoch, JobId, KeyId
from distensor.core.job_report import PassedNode
from distensor.hub import access
from distensor.hub.accounts import Quota, mint_key, new_account, revoked, rotated
from distensor.hub.audit import AuditEntry, Outcome
from distensor.hub.records import JobRecord, NodeRecord, Placement
from distensor.hub.repository import Store
from distensor.hub.stores.postgres import PostgresStore
from distensor.hub.stores.sqlite import SqliteStore
from distensor.testing.hub_store import MemoryStore

ME = new_account("me", ALL_KINDS, 100)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path, postgres: PostgresServer) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    if request.param == "sqlite":
        opened: Store = SqliteStore(tmp_path / "hub.sqlite")
    else:
        opened = PostgresStore(postgres.new_database(), exclusive=False)
    with closing(opened):
        yield opened


def test_an_account_is_found_as_it_was_saved_last(store: Store) -> None:
    other = replace(new_account("zoe", frozenset({KeyKind.PROVIDER}), 5), quota=Quota(workers=3, priority=2))
    with store.transaction() as books:
        books.save_account(other)
        books.save_account(ME)
        books.save_account(replace(ME, disabled=True, quota=Quota(waiting=1)))
    with store.transaction() as books:
        assert books.accounts() == (replace(ME, disabled=True, quota=Quota(waiting=1)), other)
        assert books.find_account(AccountId("zoe")) == other
        assert books.find_account(AccountId("nobody")) is None


def test_a_key_is_found_by_its_hash_and_id_through_its_life(store: Store) -> None:
    key = mint_key(ME, KeyKind.PROVIDER, 100, label="garage", expires_at=900).record
    with store.transaction() as books:
        books.save_account(ME)
        books.save_key(key)
        books.touch_key(key.key_id, 150)
    old, fresh = rotated(key, 200, 60)
    with store.transaction() as books:
        books.save_key(replace(old, last_used_at=150))
        books.save_key(fresh.record)
        assert books.find_key(key.secret_hash) == replace(old, last_used_at=150)
        assert books.key(fresh.record.key_id) == fresh.record
        assert [one.key_id for one in books.list_keys()] == [key.key_id, fresh.record.key_id]
        assert books.list_keys(AccountId("zoe")) == ()
        assert books.find_key("none") is books.key(KeyId("none")) is None


def test_who_is_barred_follows_from_accounts_and_keys(store: Store) -> None:
    key = mint_key(ME, KeyKind.PROVIDER, 100).record
    old, fresh = rotated(key, 200, 60)
    with store.transaction() as books:
        books.save_account(ME)
        books.save_account(replace(new_account("x", ALL_KINDS, 1), disabled=True))
        books.save_key(revoked(old, 300))
        books.save_key(fresh.record)
        before = books.barred()
        books.save_key(revoked(fresh.record, 300))
        after = books.barred()
    assert (before.accounts, before.keys, before.families) == ({"x"}, {key.key_id}, frozenset())
    assert after.families == {key.key_id}


def test_a_key_of_no_account_is_no_key(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)account|foreign"), store.transaction() as books:
        books.save_key(mint_key(ME, KeyKind.TRAINER, 1).record)
    with store.transaction() as books:
        assert books.list_keys() == ()


def test_the_version_rises_with_each_change(store: Store) -> None:
    with store.transaction() as books:
        first = books.access_version()
        books.raise_access_version()
        assert books.access_version() == first + 1


def test_the_audit_log_is_read_backwards_page_by_page(store: Store) -> None:
    entries = [
        AuditEntry(at=number, actor="operator", action="a", target=str(number), outcome=Outcome.DONE)
        for number in range(5)
    ]
    with store.transaction() as books:
        for entry in entries:
            books.append_audit(entry)
        first = books.audit(3)
        rest = books.audit(3, first[-1].number)
    assert [replace(entry, number=0) for entry in (*first, *rest)] == entries[::-1]


@pytest.mark.parametrize("change", ["UPDATE audit SET detail = 'x'", "DELETE FROM audit"])
def test_no_line_of_the_audit_log_is_ever_changed(tmp_path: Path, change: str) -> None:
    with closing(SqliteStore(tmp_path / "hub.sqlite")) as store:
        with store.transaction() as books:
            books.append_audit(AuditEntry(at=1, actor="o", action="a", target="t", outcome=Outcome.REFUSED))
        with pytest.raises(Exception, match="append-only"), store.transaction() as books:
            books._run(change)
        with store.transaction() as books:
            assert len(books.audit(5)) == 1


def test_tokens_and_nodes_keep_their_account(store: Store) -> None:
    node_id = NODES[0]
    node = NodeRecord(
        node_id=node_id,
        secret_hash="h",
        info=replace(info("atlas"), node_id=node_id),
        account=AccountId("me"),
        joined_by=KeyId("k_1"),
    )
    token = access.token_for("s" * 20, Role.NODE, "node", AccountId("me"))
    with store.transaction() as books:
        books.save_node(node)
        books.save_token(token)
    with store.transaction() as books:
        [kept] = books.snapshot().nodes
        assert (kept.account, kept.joined_by) == ("me", "k_1")
        assert books.find_token(token.secret_hash) == token


def test_a_job_waits_with_its_wish_and_is_placed_with_its_reasons(store: Store) -> None:
    fill(store)
    wish = replace(spec(2, csr="request"), bytes_per_rank=(5, 7), device_kinds=(DeviceKind.CPU,), wait=True, priority=3)
    with store.transaction() as books:
        [placed] = [job for job in books.snapshot().jobs if job.job_id == JOB]
    waiting = JobRecord(
        job_id=JobId("j_2"),
        owner="main",
        submission="s2",
        name="later",
        parallel=wish.parallel,
        epoch=placed.epoch,
        state=JobState.QUEUED,
        driver_certificate_pem="",
        ranks=(),
        reason="no room",
        wish=wish,
    )
    with store.transaction() as books:
        books.insert_job(waiting)
    with store.transaction() as books:
        assert [job for job in books.snapshot().jobs if job.job_id == "j_2"] == [waiting]
    kept = replace(wish, csr_pem="", bytes_per_rank=())
    reasons = Placement(whys=("together", "together"), passed=(PassedNode(node="bolt", why="no free slot"),))
    started = replace(waiting, state=JobState.PLACED, reason="", wish=kept, ranks=placed.ranks[:2], placement=reasons)
    with store.transaction() as books:
        books.begin_epoch(started)
    with store.transaction() as books:
        assert [job for job in books.snapshot().jobs if job.job_id == "j_2"] == [started]


def test_a_job_is_found_with_the_ranks_of_each_of_its_epochs(store: Store) -> None:
    fill(store)
    with store.transaction() as books:
        before = books.find_job(JOB)
        assert before is not None
        later = replace(before, epoch=Epoch(3), state=JobState.PLACED, request="r", ranks=before.ranks[:1])
        books.begin_epoch(later)
        moved = replace(later.ranks[0], restarts=2, reason="it came back")
        books.save_rank(JOB, Epoch(3), moved)
    with store.reading() as books:
        assert books.find_job(JOB) == replace(later, ranks=(moved,))
        assert books.find_job(JobId("j_none")) is None
        assert books.epochs_of(JOB) == (2, 3)
        assert [books.ranks_of(JOB, Epoch(epoch)) for epoch in (2, 3, 4)] == [before.ranks, (moved,), ()]
        assert books.epochs_of(JobId("j_none")) == ()
