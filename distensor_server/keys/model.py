"""A key and where it came from, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

VARIABLE = "DISTENSOR_API_KEY"
ALIAS = "DISTENSOR_JOIN_TOKEN"
"""The older name of the same variable."""


class KeySource(StrEnum):
    """In the order in which they are asked."""

    OPTION = "option"
    CREDENTIALS = "credentials"
    ENVIRONMENT = "environment"
    KEYRING = "keyring"
    FILE = "file"
    GIVEN = "given"
    """Handed over by `distensor auth login` or the dashboard while the supervisor runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundKey:
    """A key. Its `repr` does not show it. `where` names the file, variable or keyring."""

    key: str = field(repr=False)
    source: KeySource
    where: str

    @property
    def masked(self) -> str:
        return masked(self.key)


def masked(key: str) -> str:
    """The kind of the key and its last four characters, which are part of a checksum and no secret."""
    kind, mark, rest = key.rpartition("_")
    return f"{kind[:8]}{mark}...{rest[-4:]}" if len(rest) >= 16 else "..."
