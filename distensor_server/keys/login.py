"""Take a new key: check it, keep it. Used by the running supervisor, and by `auth login` where none runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from distensor.comm.tokens import JoinToken, decode_node_token
from distensor.core.errors import AuthenticationError
from distensor_server.keys.chain import KeyStore
from distensor_server.keys.model import FoundKey

Check: TypeAlias = Callable[[str], Awaitable[JoinToken]]
_ACCOUNT_KEY = re.compile(r"dt_[a-z]_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Login:
    """A key that was kept. `tested`: the hub knows it."""

    kept: FoundKey
    hub: str
    tested: bool
    fingerprint: str = field(repr=False)


def read_key(text: str) -> JoinToken:
    """What the key says of its hub.

    Raises:
        AuthenticationError: it is no key, cut off, or for somebody else. The message never repeats it.
    """
    if _ACCOUNT_KEY.match(text.strip()):
        raise AuthenticationError(
            "keys of accounts (dt_...) are not used by this version; use a node's token (dtj_...)"
        )
    return decode_node_token(text)


async def check_with_hub(text: str) -> JoinToken:
    """Raises: AuthenticationError, HubUnreachableError, HubProtocolError."""
    read_key(text)
    from distensor.comm.key_check import check_node_token  # grpc: only where somebody asks

    return await check_node_token(text)


async def log_in(key: str, store: KeyStore, *, test: bool, in_file: bool, check: Check = check_with_hub) -> Login:
    """Check the key and keep it; a key that is not good is not kept.

    Raises:
        AuthenticationError, HubUnreachableError, HubProtocolError: the check failed.
        StoreError: it cannot be kept.
    """
    key = key.strip()
    token = await check(key) if test else read_key(key)
    kept = await asyncio.to_thread(store.keep, key, in_file=in_file)
    return Login(kept=kept, hub=str(token.address), tested=test, fingerprint=token.fingerprint)
