"""What a micro-credit is worth in money, and how it is rounded.

Money has its own smallest unit (a cent), which is worth a whole number of micro-credits. An amount is rounded down to
whole ones before it is set aside, so the payment and what the ledger takes are the same to the micro-credit, and the
rest stays payable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from distensor.core.errors import ConfigError, LedgerError

LARGEST_MINOR = 99_999_999
"""Stripe takes eight digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """`micro_per_minor` micro-credits are one smallest unit of `currency`: 10,000 where a credit is a euro.

    Raises:
        ConfigError: a currency that is not three small letters, or a number that is not from 1 up.
    """

    currency: str
    micro_per_minor: int
    least_minor: int = 100
    """Smaller payouts are not made."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]{3}", self.currency):
            raise ConfigError(f"currency {self.currency!r}: expected three small letters, as in eur")
        for name in ("micro_per_minor", "least_minor"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a whole number from 1 up")

    def payable_part(self, micro: int) -> int:
        """How many of `micro` can be paid out now: whole units of money, or 0 where they are too few."""
        minor = min(micro // self.micro_per_minor, LARGEST_MINOR)
        return minor * self.micro_per_minor if minor >= self.least_minor else 0

    def minor(self, micro: int) -> int:
        """The amount of money of a payout.

        Raises:
            LedgerError: it is no whole number of smallest units, or more than one payment may be.
        """
        minor, rest = divmod(micro, self.micro_per_minor)
        if rest or not 1 <= minor <= LARGEST_MINOR:
            raise LedgerError(
                f"a payout of {micro} micro-credits is no amount in {self.currency}: expected 1 to {LARGEST_MINOR} "
                f"times {self.micro_per_minor} micro-credits"
            )
        return minor
