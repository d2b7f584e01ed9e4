"""Keys: what an account shows to a hub, as often as it likes, until the key is revoked.

    dt_p_ | dt_u_ | dt_a_   <43 letters and digits>   <8 hex digits>
    provider trainer admin  256 random bits           checksum of all before it

The checksum tells a key that was cut off while copying from a wrong one, without asking the hub. A key alone does not
say where the hub is: a join token (`comm.tokens`) whose secret is a key does.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from enum import StrEnum

from distensor.core.errors import AuthenticationError

_ALPHABET = string.ascii_letters + string.digits
_RANDOM = 43
_CHECKSUM = 8
_SHOWN = 7
_FORM = re.compile(rf"dt_[pua]_[A-Za-z0-9]{{{_RANDOM}}}[0-9a-f]{{{_CHECKSUM}}}")


class KeyKind(StrEnum):
    """What a key is for."""

    PROVIDER = "provider"
    TRAINER = "trainer"
    ADMIN = "admin"

    @property
    def prefix(self) -> str:
        return _PREFIXES[self]


_PREFIXES = {KeyKind.PROVIDER: "dt_p_", KeyKind.TRAINER: "dt_u_", KeyKind.ADMIN: "dt_a_"}
_KINDS = {prefix: kind for kind, prefix in _PREFIXES.items()}
_PREFIX = len("dt_p_")


def new_key(kind: KeyKind) -> str:
    """A new key of this kind, from the system's random numbers."""
    body = kind.prefix + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM))
    return body + _checksum(body)


def is_key(text: str) -> bool:
    """Whether `text` means to be a key: it begins as one. It may still be damaged."""
    return text[:_PREFIX] in _KINDS


def decode_key(text: str) -> KeyKind:
    """The kind of a key.

    Raises:
        AuthenticationError: it is none, or it was cut off or altered. The message never repeats it.
    """
    kind = _KINDS.get(text[:_PREFIX])
    if kind is None:
        raise AuthenticationError("this is no key: a key begins with dt_p_, dt_u_ or dt_a_")
    body, checksum = text[:-_CHECKSUM], text[-_CHECKSUM:]
    if _FORM.fullmatch(text) is None or not hmac.compare_digest(_checksum(body), checksum):
        raise AuthenticationError(
            f"the {kind.value} key ({len(text)} characters) is incomplete or altered: copy the whole line"
        )
    return kind


def shown_part(key: str) -> str:
    """The beginning of a key, for lists and logs: it tells keys apart and gives nothing away."""
    return key[: _PREFIX + _SHOWN]


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:_CHECKSUM]
