"""PostgreSQL: killed and started again, one hub at a time, and no password where others could read it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from hub_kit import until
from postgres_kit import PASSWORD, PostgresServer
from test_hub_metering import NODES, claim, earned, fill, receive, unit

from distensor.comm.tokens import Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import BooksRefusedError, ConfigError, ReadOnlyError, StoreError, SupersededError
from distensor.hub.access import hash_secret, token_for
from distensor.hub.metering import Posting
from distensor.hub.repository import Books
from distensor.hub.stores.address import DatabaseAddress, parse_database
from distensor.hub.stores.postgres import PostgresStore
from distensor.hub.writer import Writer


def test_commits_are_on_the_disk(postgres: PostgresServer) -> None:
    with closing(postgres.store()) as store:
        assert store._connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert store._connection.execute("SHOW fsync").fetchone() == ("on",)


def test_a_unit_is_two_entries_that_sum_to_zero_and_comes_once(postgres: PostgresServer) -> None:
    with closing(postgres.store()) as store:
        fill(store)
        claim(store, unit(0), unit(1))
        receive(store, unit(0), unit(1), unit(1))
        with postgres.connect(store._address) as beside:
            assert (
                beside.execute("SELECT account, amount FROM entries ORDER BY entry_id").fetchall()
                == [
                    ("pending:n_a", 4000),
                    ("platform", -4000),
                ]
                * 2
            )
            with pytest.raises(psycopg.errors.IntegrityError, match="append-only"):
                beside.execute("TRUNCATE entries")
        posting = Posting(key=unit(0).key, owner="main", node_id=NODES[0], amount=1, hour=1)
        with pytest.raises(BooksRefusedError, match="unique"), store.transaction() as books:
            books.post([posting])
        assert earned(store).confirmed_micro == 8000


def test_a_text_with_a_nul_is_kept_without_it(postgres: PostgresServer) -> None:
    with closing(postgres.store()) as store:
        with store.transaction() as books:
            books.save_token(token_for("secret", Role.NODE, "a\0b"))
        with store.reading() as books:
            found = books.find_token(hash_secret("secret"))
    assert found is not None
    assert found.subject == "a\N{REPLACEMENT CHARACTER}b"


def test_one_hub_at_a_time(postgres: PostgresServer) -> None:
    address = postgres.new_database()
    with closing(PostgresStore(address, exclusive=True)):
        with pytest.raises(StoreError, match="another hub is running on it"):
            PostgresStore(address, exclusive=True, hold_seconds=0.2)
        PostgresStore(address, exclusive=False).close()  # `distensor hub token` beside it
    PostgresStore(address, exclusive=True).close()


def test_a_hub_that_lost_its_connection_and_was_replaced_writes_no_more(postgres: PostgresServer) -> None:
    address = postgres.new_database()
    first = PostgresStore(address, exclusive=True)
    with first.transaction() as books:
        assert books.begin_generation() == 1
    with postgres.connect(address) as beside:
        beside.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                       "AND datname = current_database()")  # fmt: skip
    second = PostgresStore(address, exclusive=True)
    with second.transaction() as books:
        assert books.begin_generation() == 2
        fill_one(books, "second")
    with pytest.raises(StoreError), first.transaction() as books:
        fill_one(books, "first")
    second.close()
    with pytest.raises(SupersededError, match=r"at start 2, this one was start 1"), first.transaction() as books:
        fill_one(books, "first")
    with first.reading() as books:
        assert books.find_token(hash_secret("first")) is None
        assert books.find_token(hash_secret("second")) is not None
    first.close()


def fill_one(books: Books, name: str) -> None:
    books.save_token(token_for(name, Role.NODE, name))


@pytest.mark.asyncio
async def test_while_the_database_is_away_writes_wait_and_nothing_is_lost() -> None:
    server = await asyncio.to_thread(PostgresServer)
    troubles: list[StoreError] = []
    try:
        address = server.new_database()
        with closing(PostgresStore(address, exclusive=True)) as store:
            writer = Writer(store, SYSTEM_CLOCK, troubles.append)
            await writer.submit(lambda books: fill_one(books, "before"))
            server.kill()
            waiting = [writer.submit(lambda books, n=number: fill_one(books, f"t{n}")) for number in range(20)]
            await until(lambda: troubles, what="the first commit that fails")
            with pytest.raises(ReadOnlyError, match="not write them at present"):
                writer.require_writable()
            with pytest.raises(StoreError):
                await writer.read(lambda books: books.find_token("x"))
            assert not any(future.done() for future in waiting)
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(asyncio.gather(*waiting), 30)
            writer.require_writable()
            for name in ("before", *(f"t{number}" for number in range(20))):
                assert await writer.read(lambda books, n=name: books.find_token(hash_secret(n))) is not None
            await writer.close()
    finally:
        await asyncio.to_thread(server.close)


def test_a_commit_that_was_made_is_known_although_its_answer_was_lost(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends right after the commit: the group is neither lost nor run again."""
    address = postgres.new_database()
    with closing(PostgresStore(address, exclusive=True)) as store:
        fill(store)
        execute, cut = psycopg.Connection.execute, threading.Event()

        def commit_and_lose_the_answer(self: psycopg.Connection[object], query: object, *more: object) -> object:
            result = execute(self, query, *more)  # type: ignore[arg-type]
            if query == "COMMIT" and not cut.is_set():
                cut.set()
                self.close()
                raise psycopg.OperationalError("the answer was lost")
            return result

        monkeypatch.setattr(psycopg.Connection, "execute", commit_and_lose_the_answer)
        claim(store, unit(0))  # no error
        assert cut.is_set()
        receive(store, unit(0))
        assert earned(store, NODES[0]).confirmed_micro == 4000


def test_the_password_is_in_no_text(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush hush\n")
    for address in (
        parse_database("postgresql://me@db.example:5433/books?sslmode=require", {}, file),
        parse_database("postgres://me@db.example/books", {"DISTENSOR_DATABASE_PASSWORD": "hush hush"}, None),
    ):
        assert address.password == "hush hush"
        assert "hush" not in f"{address} {address!r}"
        assert "hush hush" in address.conninfo()
        assert (address.host, address.user, address.name) == ("db.example", "me", "books")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("postgresql://me:geheim@host/name", "has a password in it"),
        ("mysql://host/name", "expected postgresql://"),
        ("postgresql://host", "names no database"),
        ("postgresql://host:zzz/name", "expected postgresql://"),
        ("postgresql://host/name?colour=red", "'colour' is not known"),
    ],
)
def test_an_address_that_cannot_work_is_named_without_its_password(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_database(text, {}, None)
    assert "geheim" not in str(caught.value)


def test_a_wrong_password_is_an_error_that_does_not_say_it(postgres: PostgresServer) -> None:
    address = postgres.new_database()
    wrong = DatabaseAddress(host=address.host, port=address.port, user="hub", name=address.name, password="wrong word")
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        PostgresStore(wrong, exclusive=True)
    assert "wrong word" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_transaction_of_which_nothing_was_written_was_not_committed() -> None:
    """A database that is killed may forget that it ever gave the transaction its number."""
    server = PostgresServer()
    try:
        with closing(server.store()) as store:
            store._connection.execute("BEGIN")
            number = store._fence(store._connection)
            store._connection.execute("INSERT INTO meta (key, value) VALUES ('x', 1)")
            server.kill()
            store._connection.close()
            server.start()
            assert not store._was_committed(number)
            with store.transaction() as books:
                assert books.begin_generation() == 1
    finally:
        server.close()
