"""Several hubs on one database: one serves, the others wait, and all are the same hub to nodes and trainers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing

from distensor.core.clock import Clock
from distensor.core.errors import StoreError
from distensor.hub.pki import Authority
from distensor.hub.repository import Books, Store
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.opening import open_store, wait_for_store
from distensor.hub.writer import Writes

RENEW_SECONDS = 2.0
"""How often a hub says in its database that it serves."""


async def store_in_turn(
    database: DatabaseAddress, authority: Authority, log: Callable[[str], None], stop: asyncio.Event
) -> Store | None:
    """The books of a hub that stands by, once no other one serves; None where `stop` was set before.

    Raises:
        StoreError: as `open_store`, or the hub that serves has another authority.
    """
    with closing(open_store(database)) as store, store.reading() as books:
        check_authority(books, authority, database)  # now, not when it is needed
    ended, told = threading.Event(), threading.Event()

    def tell(_age: float | None) -> None:
        if not told.is_set():
            told.set()
            log(f"another hub serves on {database}; this one waits to take its place")

    waiting = asyncio.create_task(asyncio.to_thread(wait_for_store, database, ended, tell))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        ended.set()
    return await waiting


def check_authority(books: Books, authority: Authority, database: DatabaseAddress) -> int:
    """The mark of the authority, which is that of the hub whose books these are: nodes trust one.

    Raises:
        StoreError: they are another hub's.
    """
    mark = int(authority.fingerprint[:15], 16)  # as much as a whole number of the tables holds
    if books.authority_mark() not in (None, mark):
        raise StoreError(
            f"database {database} belongs to a hub of another authority: copy authority.key and authority.pem of that "
            "hub's state directory into this one's, readable by their owner only"
        )
    return mark


async def keep_lease(writer: Writes, clock: Clock) -> None:
    """Commit nothing, but often: the store renews its lease with each commit, and hears when it has lost it.

    Raises:
        SupersededError: another hub has taken over.
    """
    while True:
        await writer.submit(_nothing)
        await clock.sleep_async(RENEW_SECONDS)


def _nothing(_: Books) -> None:
    pass
