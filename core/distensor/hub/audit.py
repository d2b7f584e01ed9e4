"""The audit log: what was changed and what was refused. Lines are added and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OPERATOR = "operator"
"""Whoever works on the hub's own machine."""


class Outcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    """One line of the audit log. It never holds a secret.

    `at` is whole UTC seconds of the hub's clock. `actor` is OPERATOR, or kind, account and key of a caller, or the host
    of one that was not recognised. `number` is 0 until the entry is in the books.
    """

    at: int
    actor: str
    action: str
    target: str
    outcome: Outcome
    detail: str = ""
    number: int = 0
