"""More join tokens for a hub that has been started before, running or not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from distensor.comm.keys import KeyKind
from distensor.comm.tokens import Role
from distensor.core.clock import Clock
from distensor.core.errors import ConfigError, StoreError
from distensor.core.ids import AccountId
from distensor.hub import access
from distensor.hub.access_books import AccessBooks
from distensor.hub.accounts import MAIN
from distensor.hub.administration import Clerk, account_of
from distensor.hub.audit import OPERATOR
from distensor.hub.hashing import new_secret
from distensor.hub.place import place_of
from distensor.hub.state_directory import StateDirectory
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.opening import open_store


def make_node_tokens(
    state: Path, count: int, clock: Clock, database: DatabaseAddress | None = None, *, account: str = MAIN
) -> list[str]:
    """New tokens for nodes of an account, with the address at which the hub listened last.

    Raises:
        StoreError: no hub has run on this state directory, or it cannot be read or written.
        ConfigError: there is no such account, it is disabled, or it lends no machines.
    """
    directory = StateDirectory(state)
    place = place_of(directory)
    if place is None:
        raise StoreError(f"state directory {state}: no hub has been started on it yet")
    secrets = [new_secret() for _ in range(count)]
    clerk = Clerk(actor=OPERATOR, now=int(clock.now()))
    with closing(open_store(database or directory.database)) as store, store.transaction() as books:
        _require_provider(books, account)
        for secret in secrets:
            books.save_token(access.token_for(secret, Role.NODE, "node", AccountId(account)))
        if secrets:
            clerk.write(books, "token create", account, f"{count} for nodes")
    return [place.token(Role.NODE, secret) for secret in secrets]


def _require_provider(books: AccessBooks, name: str) -> None:
    account = account_of(books, name)
    if account.disabled:
        raise ConfigError(f"account {name} is disabled; `distensor hub account enable {name}` lets it in again")
    if KeyKind.PROVIDER not in account.kinds:
        kinds = ", ".join(sorted(account.kinds))
        raise ConfigError(f"account {name} is for {kinds}, and lends no machines; choose one with kind provider")
