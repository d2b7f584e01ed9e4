"""Who may join a hub: what join tokens and provider keys make of a machine."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace

from distensor.comm.tokens import Role
from distensor.core.control import NodeInfo
from distensor.core.errors import AuthenticationError
from distensor.core.ids import AccountId, KeyId, NodeId
from distensor.hub.accounts import MAIN
from distensor.hub.hashing import hash_secret
from distensor.hub.records import NodeRecord, TokenRecord
from distensor.hub.repository import Books

_BY_KEY = "key"
"""The subject of a row that stands for a machine which joins by a key, and which nobody may show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """A machine that wants to be a node, and what it will be called if it may."""

    info: NodeInfo
    host: str
    """From where the hub sees it."""
    node_id: NodeId
    credential: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinKey:
    """The provider key that a machine joins by."""

    secret_hash: str = field(repr=False)
    family: KeyId
    account: AccountId


def token_for(secret: str, role: Role, subject: str, account: AccountId = MAIN) -> TokenRecord:
    return TokenRecord(secret_hash=hash_secret(secret), role=role.value, subject=subject, account=account)


def find_token(books: Books, secret_hash: str, role: Role) -> TokenRecord:
    """Raises: AuthenticationError: unknown, or for the other role."""
    token = books.find_token(secret_hash)
    if token is None or not hmac.compare_digest(secret_hash, token.secret_hash):
        raise AuthenticationError("the hub does not know this join token")
    if token.role != role:
        raise AuthenticationError(f"this join token is for a {token.role}, not for a {role}")
    return token


def find_unspent(books: Books, secret_hash: str) -> TokenRecord:
    """The join token of a node that has not been used up.

    Raises:
        AuthenticationError: it is unknown, for a trainer, or spent.
    """
    token = find_token(books, secret_hash, Role.NODE)
    if token.subject == _BY_KEY:  # older hubs marked machines by what could be shown as a token
        raise AuthenticationError("the hub does not know this join token")
    if token.spent:
        raise AuthenticationError(
            f"this join token has been used already, by node {token.used_by}; "
            "make a new one on the hub with `distensor hub token`"
        )
    return token


def admit(books: Books, token_hash: str, joining: Joining) -> NodeRecord:
    """Make a node of the holder of a join token, or give a new credential to the one it was used for.

    The second case is a node that crashed before it could keep its first credential.

    Raises:
        AuthenticationError: the token is unknown or spent, or its account is disabled.
    """
    token = find_unspent(books, token_hash)
    account = books.find_account(token.account)
    if account is not None and account.disabled:
        raise AuthenticationError(f"account {account.account_id} is disabled; ask the hub's operator")
    return _admit(books, token, joining, None)


def admit_by_key(books: Books, key: JoinKey, joining: Joining, former: NodeId | None) -> NodeRecord:
    """Make a node of the holder of a provider key, as many as there are machines.

    `former` is a node of the same account that this machine says it was: it is that one again. A machine that crashed
    before it could keep its credential is known by name and address, until it has beaten once: no ghost is left behind.
    """
    if former is not None:
        joining = replace(joining, node_id=former)
    # The prefix is no hexadecimal digit: nothing that can be shown hashes to the mark.
    mark = "key:" + hash_secret(f"{key.secret_hash}/{joining.info.name}/{joining.host}")
    token = books.find_token(mark)
    if token is None or token.spent or former is not None:
        token = TokenRecord(secret_hash=mark, role=Role.NODE.value, subject=_BY_KEY, account=key.account)
    return _admit(books, token, joining, key.family)


def _admit(books: Books, token: TokenRecord, joining: Joining, joined_by: KeyId | None) -> NodeRecord:
    node_id = token.used_by or joining.node_id
    node = NodeRecord(
        node_id=node_id,
        secret_hash=hash_secret(joining.credential),
        info=replace(joining.info, node_id=node_id),
        account=token.account,
        joined_by=joined_by,
    )
    books.save_node(node)
    books.save_token(replace(token, used_by=node_id))
    return node
