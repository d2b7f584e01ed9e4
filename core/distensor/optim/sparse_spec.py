"""What the replicas of a job exchange instead of their gradients, as words of a user and as a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.ids import is_valid_name
from distensor.core.numbers import is_finite
from distensor.core.update_bytes import CHUNK, check_share


class SparseRule(StrEnum):
    """What is exchanged and how it is applied; the words are those of the Trainer's `sync`."""

    DISTRO = "distro"
    DEMO = "demo"
    DILOCO = "diloco"
    SPARSELOCO = "sparseloco"

    @property
    def local(self) -> bool:
        """Whether replicas take several steps of their own between two exchanges."""
        return self in (SparseRule.DILOCO, SparseRule.SPARSELOCO)


class Average(StrEnum):
    """How dense changes of several replicas become one."""

    MEAN = "mean"
    TRIMMED = "trimmed"
    CENTRED = "centred"


class Route(StrEnum):
    """By which way sparse updates travel between replicas."""

    PEERS = "peers"
    """Each sends to all others."""
    AGGREGATOR = "aggregator"
    """Each sends to one aggregator and gets the set of all."""
    HYBRID = "hybrid"
    """Each sends to the aggregator of its site; those send to each other."""


ANYWHERE = ""
"""In place of an aggregator's name: whichever `distensor aggregator` is there."""
_WAYS: Mapping[str, Any] = {"topology": Route.PEERS, "aggregators": (), "sites": (), "patience": None}
_SHARE: Mapping[str, Any] = {"k": 32, "chunk": CHUNK, "value_bits": 1, "clip_messages": 4.0, **_WAYS}
_DEFAULTS: Mapping[SparseRule, Mapping[str, Any]] = {
    SparseRule.DISTRO: {**_SHARE, "delay": False},
    SparseRule.DEMO: {**_SHARE, "delay": False, "decay": 0.999},
    SparseRule.DILOCO: {"every": 50, "outer_lr": 0.7, "outer_momentum": 0.9, "average": Average.MEAN},
    SparseRule.SPARSELOCO: {**_SHARE, "k": 64, "value_bits": 2, "every": 30, "outer_lr": 1.0, "feedback": 0.95},
}
"""The options of each rule, with what they are where nothing is said."""

_ADAM = frozenset({"exp_avg", "exp_avg_sq", "step"})
LOCAL = "local"
"""The field with the weights that a replica has moved to since the last exchange."""
_OWN: Mapping[SparseRule, frozenset[str]] = {
    SparseRule.DISTRO: frozenset({"residual", "exp_avg_sq", "step"}),
    SparseRule.DEMO: frozenset({"residual"}),
    SparseRule.DILOCO: _ADAM | {LOCAL},
    SparseRule.SPARSELOCO: _ADAM | {LOCAL, "residual"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSpec:
    """How replicas agree that keep their own gradients. Options of other rules have no meaning.

    Args:
        k, chunk, value_bits: `k` entries of each chunk travel, each with so many bits.
        clip_messages: a message with more than so many times the median norm is scaled down to that; None: none is.
        delay: apply what was exchanged one step later, so that computing hides the exchange.
        decay: of DeMo's momentum.
        every: steps between two exchanges, of those that take steps of their own.
        outer_lr, outer_momentum: of the outer step.
        feedback: decay of the residual of SparseLoCo.
        average: of DiLoCo's changes.
        topology: by which way updates travel; aggregators: names of the nodes where they are, the first one is used
            and the others stand by; sites: (its aggregator's node, the nodes of its replicas) of each.
        patience: seconds that an aggregator waits for the others after the first update of a round; None: until all
            are there.

    Raises:
        ConfigError: a value that no worker could use.
    """

    rule: SparseRule
    k: int = 32
    chunk: int = CHUNK
    value_bits: int = 1
    clip_messages: float | None = 4.0
    delay: bool = False
    decay: float = 0.999
    every: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    feedback: float = 1.0
    average: Average = Average.MEAN
    topology: Route = Route.PEERS
    aggregators: tuple[str, ...] = ()
    sites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    patience: float | None = None

    def __post_init__(self) -> None:
        for name, (expected, fits) in _CHECKS.items():
            value = getattr(self, name)
            if not fits(value):
                raise ConfigError(f"sync_options[{name!r}]={value!r}: expected {expected}")
        check_share(self.k, self.chunk)
        if bool(self.sites) != (self.topology is Route.HYBRID):
            raise ConfigError(
                f"sync_options: topology={self.topology.value!r} with sites={dict(self.sites)!r}; 'hybrid' takes "
                "sites, {'aggregator node': ['node', ...], ...}, and the others none"
            )
        if self.topology is not Route.AGGREGATOR and self.aggregators:
            raise ConfigError(
                f"sync_options['aggregators']={list(self.aggregators)!r}: only with topology='aggregator'; with "
                "'hybrid' the keys of sites name them"
            )

    @property
    def aggregator_nodes(self) -> tuple[str, ...]:
        """Where a job needs an aggregator, by names of nodes; an empty one is any that serves."""
        if self.topology is Route.AGGREGATOR:
            return self.aggregators or (ANYWHERE,)
        return tuple(site for site, _ in self.sites)

    @property
    def own_fields(self) -> frozenset[str]:
        """The fields of the optimizer's state that are another replica's otherwise; all others are equal."""
        return _OWN[self.rule]

    def exchanges(self, step: int, last: int | None) -> bool:
        """Whether replicas exchange after `step`: every so many steps, and after the `last` one of a run."""
        return step % self.every == 0 or step == last

    def to_json(self) -> dict[str, Any]:
        words = {"rule": self.rule.value, "average": self.average.value, "topology": self.topology.value}
        return {**asdict(self), **words}

    @classmethod
    def from_json(cls, data: object) -> SparseSpec:
        """From another process; checked like a user's words."""
        known = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or data.keys() != known or data["rule"] not in tuple(SparseRule):
            raise ConfigError(f"sparse {str(data)[:200]}: expected {', '.join(sorted(known))}")
        return cls(**{**data, "rule": SparseRule(data["rule"]), "average": _average(data["average"]), **_ways(data)})


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fraction(value: Any) -> bool:
    return is_finite(value) and 0 <= value < 1


_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "k": ("a whole number", _is_whole),
    "chunk": ("a whole number", _is_whole),
    "value_bits": ("1 or 2", lambda value: _is_whole(value) and value in (1, 2)),
    "clip_messages": (
        "a number of at least 1, or None",
        lambda value: value is None or (is_finite(value) and value >= 1),
    ),
    "delay": ("True or False", lambda value: isinstance(value, bool)),
    "decay": ("a number in [0, 1)", _fraction),
    "every": ("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1),
    "outer_lr": ("a positive number", lambda value: is_finite(value) and value > 0),
    "outer_momentum": ("a number in [0, 1)", _fraction),
    "feedback": ("a number in [0, 1]", lambda value: is_finite(value) and 0 <= value <= 1),
    "patience": ("a positive number of seconds, or None", lambda value: value is None or _is_patience(value)),
}
MOST_AGGREGATORS = 64


def _is_patience(value: Any) -> bool:
    return is_finite(value) and 0 < value <= 86_400


def _ways(data: Mapping[str, Any]) -> dict[str, Any]:
    """The words about the way of updates, from a user or from another process."""
    topology, sites = data["topology"], data["sites"]
    if topology not in tuple(Route):
        raise ConfigError(f"sync_options['topology']={topology!r}: expected {', '.join(repr(str(r)) for r in Route)}")
    pairs = sites.items() if isinstance(sites, Mapping) else sites
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise ConfigError(f"sync_options['sites']={str(sites)[:100]}: expected lists of nodes by aggregator")
    found = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"sync_options['sites'] has {str(pair)[:100]}: expected an aggregator and its nodes")
        found.append((pair[0], _node_names("sites", pair[1])))
    nodes = [node for _, own in found for node in own]
    if len(set(nodes)) < len(nodes) or len({site for site, _ in found}) < len(found) or len(found) > MOST_AGGREGATORS:
        raise ConfigError(f"sync_options['sites']={str(sites)[:200]}: a node belongs to one site; at most 64 sites")
    return {
        "topology": Route(topology),
        "aggregators": _node_names("aggregators", data["aggregators"]),
        "sites": tuple(found),
    }


def _node_names(key: str, value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [None]
    if len(names) > 1024 or not all(isinstance(name, str) and (not name or is_valid_name(name)) for name in names):
        raise ConfigError(f"sync_options[{key!r}] has {str(value)[:100]}: expected a list of names of nodes")
    return tuple(names)


def _average(value: object) -> Average:
    if value not in tuple(Average):
        raise ConfigError(f"sync_options['average']={value!r}: expected {' or '.join(repr(str(a)) for a in Average)}")
    return Average(str(value))


def parse_sync_options(sync: str, options: Mapping[str, Any] | None) -> SparseSpec | None:
    """The spec of a `sync` whose replicas keep their own gradients, None for all others.

    Raises:
        ConfigError: options that this `sync` does not take.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"sync_options={options!r}: expected a dict")
    given = dict(options or {})
    if sync not in tuple(SparseRule):
        if given and sync == "zero3" and given.keys() & _DEFAULTS[SparseRule.DISTRO].keys():
            raise UnsupportedOptionError(
                f"sync='zero3' with sync_options={given!r}: weights that are cut over the replicas and updates that "
                "replicas exchange do not go together, since each replica needs its own second moment and residual "
                "whole (decision 10); use sync='distro' with these options, or sync='zero3' without"
            )
        if given:
            raise ConfigError(f"sync_options={given!r}: sync={sync!r} takes none")
        return None
    rule = SparseRule(sync)
    defaults = _DEFAULTS[rule]
    if unknown := [name for name in given if name not in defaults]:
        raise ConfigError(f"sync_options has {unknown[0]!r}; sync={sync!r} takes {', '.join(defaults)}")
    if "average" in given:
        given["average"] = _average(given["average"])
    whole = {**defaults, **given}
    return SparseSpec(rule=rule, **{**whole, **(_ways(whole) if "topology" in defaults else {})})
