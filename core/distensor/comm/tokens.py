"""Join tokens: one line of text that carries where the hub is, what its authority looks like, and a secret.

    dtj_<base64url of {"a": "host:port", "f": sha256 of the authority, "r": role, "s": secret}><8 hex digits>

A hub that another process of the same books may take the place of has further addresses, as a list "o".
The last eight characters are a checksum, so that a token that was cut off while copying is told from a wrong one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, field
from enum import StrEnum

from distensor.comm.address import HubAddress, parse_address
from distensor.core.errors import AuthenticationError, ConfigError

PREFIX = "dtj_"
_CHECKSUM = 8
_LONGEST = 1024
MOST_OTHERS = 4
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}")


class Role(StrEnum):
    """What a token lets its holder be."""

    NODE = "node"
    TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinToken:
    """A decoded token. Its `repr` does not show the secret."""

    address: HubAddress
    fingerprint: str
    role: Role
    secret: str = field(repr=False)
    others: tuple[HubAddress, ...] = ()
    """Where the same hub is when it is not at `address`."""

    @property
    def addresses(self) -> tuple[HubAddress, ...]:
        return self.address, *self.others

    def encode(self) -> str:
        body: dict[str, object] = {
            "a": str(self.address),
            "f": self.fingerprint,
            "r": self.role.value,
            "s": self.secret,
        }
        if self.others:
            body["o"] = [str(other) for other in self.others]
        text = base64.urlsafe_b64encode(json.dumps(body, separators=(",", ":")).encode()).decode().rstrip("=")
        return PREFIX + text + _checksum(text)


def decode_token(text: str) -> JoinToken:
    """Read a token.

    Raises:
        AuthenticationError: it is no token, it was cut off or altered. The message never repeats the token.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > _LONGEST:
        raise AuthenticationError(f"this is not a join token: it should begin with {PREFIX!r} (the hub prints it)")
    body, checksum = text[len(PREFIX) : -_CHECKSUM], text[-_CHECKSUM:]
    if len(text) <= len(PREFIX) + _CHECKSUM or _checksum(body) != checksum:
        raise AuthenticationError(
            f"the join token ({len(text)} characters) is incomplete or altered: "
            "copy the whole line that the hub printed"
        )
    try:
        return _from_fields(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
    except (binascii.Error, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise AuthenticationError(f"the join token cannot be read ({type(error).__name__})") from error


def decode_node_token(text: str) -> JoinToken:
    """Read a token for a node.

    Raises:
        AuthenticationError: as `decode_token`, or it is one for a trainer.
    """
    token = decode_token(text)
    if token.role is not Role.NODE:
        raise AuthenticationError("this join token is for a trainer; a node needs a node token")
    return token


def _from_fields(fields: object) -> JoinToken:
    if not isinstance(fields, dict) or not all(isinstance(fields.get(key), str) for key in "afrs"):
        raise ConfigError("expected the fields a, f, r and s")
    if not _FINGERPRINT.fullmatch(fields["f"]) or not _SECRET.fullmatch(fields["s"]):
        raise ConfigError("fingerprint or secret is malformed")
    others = fields.get("o", [])
    if not isinstance(others, list) or len(others) > MOST_OTHERS or not all(isinstance(one, str) for one in others):
        raise ConfigError(f"expected at most {MOST_OTHERS} further addresses")
    return JoinToken(
        address=parse_address(fields["a"]),
        fingerprint=fields["f"],
        role=Role(fields["r"]),
        secret=fields["s"],
        others=tuple(map(parse_address, others)),
    )


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:_CHECKSUM]
