"""A hub behind a real gRPC port, with its books in memory, and callers of every kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from distensor.comm.address import HubAddress
from distensor.comm.keys import KeyKind
from distensor.comm.server import start_server
from distensor.comm.tokens import JoinToken, Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import StoreError
from distensor.core.ids import AccountId, new_job_id, new_node_id
from distensor.hub import access
from distensor.hub.access_books import AccessBooks
from distensor.hub.accounts import MAIN, main_account
from distensor.hub.administration import Clerk, add_account, create_key
from distensor.hub.app import Inside
from distensor.hub.audit import AuditEntry
from distensor.hub.authorization import Scope
from distensor.hub.door import Door
from distensor.hub.hashing import new_secret
from distensor.hub.machine import HubMachine, Patience
from distensor.hub.pki import Authority
from distensor.hub.service import HubService, Mint
from distensor.hub.throttle import DEFAULT_LIMIT, Limit
from distensor.hub.writer import Writer
from distensor.testing.hub_store import MemoryStore

T = TypeVar("T")
ALL_KINDS = frozenset(KeyKind)
QUICK = Patience(heartbeat=0.2)


@dataclass
class DoorHub:
    """The hub, its books, and what makes tokens for it."""

    store: MemoryStore
    writer: Writer
    address: HubAddress
    fingerprint: str
    authority_pem: str
    inside: Inside
    lines: list[str] = field(default_factory=list)

    async def do(self, run: Callable[[AccessBooks], T]) -> T:
        """Change the books as another process would: the hub hears of it by its own looking."""
        return await self.writer.submit(run)

    async def account(self, name: str) -> None:
        await self.do(lambda books: add_account(books, clerk(), name, ALL_KINDS))

    async def key(self, account: str, kind: KeyKind, *scopes: Scope) -> tuple[str, str]:
        """The text and the id of a new key."""
        only = frozenset(scopes) or None
        minted = await self.do(lambda books: create_key(books, clerk(), account, kind, scopes=only))
        return minted.text, minted.record.key_id

    async def join_secret(self, account: str = MAIN) -> str:
        """The secret of a new join token for one node."""
        secret = new_secret()
        token = access.token_for(secret, Role.NODE, "node", AccountId(account))
        await self.writer.submit(lambda books: books.save_token(token))
        return secret

    def token(self, role: Role, secret: str) -> str:
        return JoinToken(address=self.address, fingerprint=self.fingerprint, role=role, secret=secret).encode()

    async def audit(self, most: int = 1000) -> tuple[AuditEntry, ...]:
        return await self.do(lambda books: books.audit(most))


def clerk() -> Clerk:
    return Clerk(actor="test", now=int(SYSTEM_CLOCK.now()))


@contextlib.asynccontextmanager
async def door_hub(tmp_path: Path, limit: Limit = DEFAULT_LIMIT, patience: Patience = QUICK) -> AsyncIterator[DoorHub]:
    store, authority = MemoryStore(), Authority.load_or_create(tmp_path, SYSTEM_CLOCK)
    with store.transaction() as books:
        books.save_account(main_account(int(SYSTEM_CLOCK.now())))
        generation, snapshot = books.begin_generation(), books.snapshot()
        barred, version = books.barred(), books.access_version()
    machine = HubMachine(
        generation=generation,
        nodes=snapshot.nodes,
        jobs=snapshot.jobs,
        submissions=snapshot.submissions,
        earnings=snapshot.earnings,
        signer=authority,
        new_job_id=new_job_id,
        patience=patience,
        now=SYSTEM_CLOCK.monotonic(),
    )
    lines: list[str] = []
    writer = Writer(store, SYSTEM_CLOCK, _no_trouble)
    door = Door(machine.node, writer, SYSTEM_CLOCK, barred=barred, version=version, lines=limit)
    mint = Mint(node_id=new_node_id, secret=new_secret)
    service = HubService(machine, writer, SYSTEM_CLOCK, mint, lines.append, door)
    working = asyncio.create_task(service.run())
    server = await start_server(service, authority.server_identity(), HubAddress(host="127.0.0.1", port=0))
    try:
        yield DoorHub(
            store=store,
            writer=writer,
            address=server.address,
            fingerprint=authority.fingerprint,
            authority_pem=authority.authority_pem,
            inside=Inside(
                machine=machine, writer=writer, door=door, service=service, clock=SYSTEM_CLOCK, log=lines.append
            ),
            lines=lines,
        )
    finally:
        service.stop()
        await server.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await writer.close()


def _no_trouble(error: StoreError) -> None:
    raise AssertionError(error)
