"""Who may speak to the hub: tokens and credentials. Secrets are kept as hashes and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import replace

from distensor.comm.tokens import Role
from distensor.core.control import NodeInfo
from distensor.core.errors import AuthenticationError
from distensor.core.ids import NodeId
from distensor.hub.records import NodeRecord, TokenRecord
from distensor.hub.repository import Books


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def hash_secret(secret: str) -> str:
    """Secrets are 256 random bits, so a plain hash is enough; there is nothing to guess."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def matches(secret: str, secret_hash: str) -> bool:
    return hmac.compare_digest(hash_secret(secret), secret_hash)


def token_for(secret: str, role: Role, subject: str) -> TokenRecord:
    return TokenRecord(secret_hash=hash_secret(secret), role=role.value, subject=subject)


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
    if token.spent:
        raise AuthenticationError(
            f"this join token has been used already, by node {token.used_by}; "
            "make a new one on the hub with `distensor hub token`"
        )
    return token


def admit(books: Books, token_hash: str, node_id: NodeId, credential: str, info: NodeInfo) -> NodeRecord:
    """Make a node of the holder of a join token, or give a new credential to the one it was used for.

    The second case is a node that crashed before it could keep its first credential.

    Raises:
        AuthenticationError: the token is unknown or spent.
    """
    token = find_unspent(books, token_hash)
    if token.used_by is not None:
        node_id = token.used_by
    node = NodeRecord(node_id=node_id, secret_hash=hash_secret(credential), info=replace(info, node_id=node_id))
    books.save_node(node)
    books.save_token(replace(token, used_by=node_id))
    return node
