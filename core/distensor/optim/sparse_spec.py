"""What the replicas of a job exchange instead of their gradients, as words of a user and as a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from distensor.core.errors import ConfigError
from distensor.core.update_bytes import CHUNK, check_share


class SparseRule(StrEnum):
    """How the largest entries are chosen and applied; the words are those of the Trainer's `sync`."""

    DISTRO = "distro"
    DEMO = "demo"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSpec:
    """`k` entries of each chunk travel, each with `value_bits`. `decay` is that of DeMo's momentum.

    Raises:
        ConfigError: a value that no worker could use.
    """

    rule: SparseRule
    k: int = 32
    chunk: int = CHUNK
    value_bits: int = 1
    decay: float = 0.999

    def __post_init__(self) -> None:
        for name in ("k", "chunk", "value_bits"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"sync_options[{name!r}]={value!r}: expected a whole number")
        if self.value_bits not in (1, 2):
            raise ConfigError(f"sync_options['value_bits']={self.value_bits}: expected 1 or 2")
        if not isinstance(self.decay, int | float) or isinstance(self.decay, bool) or not 0 <= self.decay < 1:
            raise ConfigError(f"sync_options['decay']={self.decay!r}: expected a number in [0, 1)")
        check_share(self.k, self.chunk)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rule": self.rule.value}

    @classmethod
    def from_json(cls, data: object) -> SparseSpec:
        """From another process; checked like a user's words."""
        known = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or data.keys() != known or data["rule"] not in tuple(SparseRule):
            raise ConfigError(f"sparse {str(data)[:200]}: expected {', '.join(sorted(known))}")
        return cls(**{**data, "rule": SparseRule(data["rule"])})


def parse_sync_options(sync: str, options: Mapping[str, Any] | None) -> SparseSpec | None:
    """The spec of a `sync` that exchanges sparse updates, None for all others.

    Raises:
        ConfigError: options that this `sync` does not take.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"sync_options={options!r}: expected a dict")
    given = dict(options or {})
    if sync not in tuple(SparseRule):
        if given:
            raise ConfigError(f"sync_options={given!r}: sync={sync!r} takes none")
        return None
    rule = SparseRule(sync)
    known = ["k", "chunk", "value_bits", *(["decay"] if rule is SparseRule.DEMO else [])]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(f"sync_options has {unknown[0]!r}; sync={sync!r} takes {', '.join(known)}")
    return SparseSpec(rule=rule, **given)
