"""ShardingSpec: how parameters are cut for tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from distensor.core.errors import ShardingError
from distensor.nn.patterns import Pattern, listed, nearest, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Cut along `dim` of the parameter."""

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ShardingError(f"Shard(dim={self.dim!r}): expected the number of a tensor dim, for example 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicate:
    """The same on every rank."""


Placement: TypeAlias = "Shard | Replicate"


@dataclass(frozen=True, slots=True, init=False)
class ShardingSpec:
    """Patterns of parameter names -> Shard or Replicate.

    Raises:
        ShardingError: something that is no pattern, or no placement.
    """

    rules: tuple[tuple[Pattern, Placement], ...]

    def __init__(self, rules: Mapping[str, Placement]) -> None:
        if not isinstance(rules, Mapping):
            raise ShardingError(f"ShardingSpec({rules!r}): expected a dict of pattern -> Shard(dim=...) or Replicate()")
        object.__setattr__(self, "rules", tuple((_parse(text), _checked(text, rule)) for text, rule in rules.items()))

    def resolve(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Placement]:
        """Parameter name -> placement, for every parameter that a rule names.

        Raises:
            ShardingError: a pattern that matches nothing, rules that disagree, a dim that the parameter lacks.
        """
        found: dict[str, tuple[Pattern, Placement]] = {}
        for pattern, placement in self.rules:
            matched = [name for name in shapes if pattern.covers(name)]
            if not matched:
                near = nearest(pattern.text, shapes)
                raise ShardingError(
                    f"pattern {pattern.text!r} of the ShardingSpec matches no parameter; "
                    f"the nearest existing names are {listed(near)}"
                )
            for name in matched:
                _check_dim(pattern, placement, name, shapes[name])
                _check_agreement(name, found.setdefault(name, (pattern, placement)), (pattern, placement))
        return {name: placement for name, (_, placement) in found.items()}


def _parse(text: str) -> Pattern:
    pattern = parse(text)
    if pattern.problem is not None:
        raise ShardingError(f"pattern {text!r} of the ShardingSpec: {pattern.problem}")
    return pattern


def _checked(text: str, placement: object) -> Placement:
    if not isinstance(placement, (Shard, Replicate)):
        raise ShardingError(f"pattern {text!r}: {placement!r} is neither Shard(dim=...) nor Replicate()")
    return placement


def _check_dim(pattern: Pattern, placement: Placement, name: str, shape: tuple[int, ...]) -> None:
    if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
        raise ShardingError(
            f"pattern {pattern.text!r} asks for {placement}, but {name!r} has {len(shape)} dims: {list(shape)}"
        )


def _check_agreement(name: str, first: tuple[Pattern, Placement], second: tuple[Pattern, Placement]) -> None:
    """Two rules may name the same parameter when they say the same."""
    if first[1] != second[1]:
        raise ShardingError(
            f"parameter {name!r} is {first[1]} by pattern {first[0].text!r} and {second[1]} by {second[0].text!r}: "
            "rules that overlap must agree"
        )
