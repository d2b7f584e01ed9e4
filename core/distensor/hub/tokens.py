"""More join tokens for a hub that has been started before, running or not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from distensor.comm.address import parse_address
from distensor.comm.tokens import JoinToken, Role
from distensor.core.clock import Clock
from distensor.core.errors import StoreError
from distensor.core.ids import AccountId
from distensor.hub import access
from distensor.hub.accounts import MAIN
from distensor.hub.administration import account_of
from distensor.hub.hashing import new_secret
from distensor.hub.pki import Authority
from distensor.hub.state_directory import StateDirectory
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.opening import open_store


def make_node_tokens(
    state: Path, count: int, clock: Clock, database: DatabaseAddress | None = None, *, account: str = MAIN
) -> list[str]:
    """New tokens for nodes of an account, with the address at which the hub listened last.

    Raises:
        StoreError: no hub has run on this state directory, or it cannot be read or written.
        ConfigError: there is no such account.
    """
    directory = StateDirectory(state)
    try:
        address = parse_address(directory.address_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"state directory {state}: no hub has been started on it yet ({error.strerror})") from error
    fingerprint = Authority.load_or_create(state, clock).fingerprint
    secrets = [new_secret() for _ in range(count)]
    with closing(open_store(database or directory.database)) as store, store.transaction() as books:
        if account != MAIN:
            account_of(books, account)
        for secret in secrets:
            books.save_token(access.token_for(secret, Role.NODE, "node", AccountId(account)))
    return [
        JoinToken(address=address, fingerprint=fingerprint, role=Role.NODE, secret=secret).encode()
        for secret in secrets
    ]
