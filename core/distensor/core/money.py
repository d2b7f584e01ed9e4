"""Credits as people write and read them; everywhere else they are whole micro-credits."""

from __future__ import annotations

import re

from distensor.core.errors import ConfigError

MICRO = 1_000_000
MOST_CREDITS = 10**12
_AMOUNT = re.compile(r"([0-9]{1,13})(?:\.([0-9]{1,6}))?", re.ASCII)


def credits_text(micro: int) -> str:
    """All six decimals, so that nothing is rounded: 1234567 is 1.234567."""
    whole, rest = divmod(abs(micro), MICRO)
    return f"{'-' if micro < 0 else ''}{whole}.{rest:06}"


def parse_credits(text: str) -> int:
    """Micro-credits of an amount like 12 or 12.5.

    Raises:
        ConfigError: it is none, is 0, has more than six decimals, or is too large.
    """
    match = _AMOUNT.fullmatch(text)
    micro = 0 if match is None else int(match[1]) * MICRO + int((match[2] or "").ljust(6, "0"))
    if not 0 < micro <= MOST_CREDITS * MICRO:
        raise ConfigError(
            f"amount {text[:40]!r}: expected credits like 12 or 12.5, more than 0, at most {MOST_CREDITS}, "
            "with at most six decimals"
        )
    return micro
