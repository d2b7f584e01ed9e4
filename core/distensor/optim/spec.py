"""Which optimizer, with which options: the words that travel, checked on both ends. The class never travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.core.numbers import is_finite
from distensor.optim.sparse_spec import SparseRule, SparseSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What an option takes: in words, and as a check."""

    expected: str
    fits: Callable[[Any], bool]


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(map(is_finite, value))


_AMOUNT = _Kind(expected="a finite number of at least 0", fits=lambda v: is_finite(v) and v >= 0)
_SIGNED = _Kind(expected="a finite number", fits=is_finite)
_FRACTION = _Kind(expected="a number in [0, 1)", fits=lambda v: is_finite(v) and 0 <= v < 1)
_FLAG = _Kind(expected="bool", fits=lambda v: isinstance(v, bool))
_BETAS = _Kind(expected="two numbers in [0, 1)", fits=lambda v: _are_numbers(v, 2) and all(0 <= beta < 1 for beta in v))
_PAIR = _Kind(expected="two numbers of at least 0", fits=lambda v: _are_numbers(v, 2) and min(v) >= 0)
_TRIPLE = _Kind(expected="three numbers", fits=lambda v: _are_numbers(v, 3))
_COUNT = _Kind(expected="an integer from 1 to 99", fits=lambda v: type(v) is int and 1 <= v <= 99)
_ADAFACTOR_EPS = _Kind(
    expected="two numbers of at least 0, the first may be None",
    fits=lambda v: (
        isinstance(v, list | tuple) and len(v) == 2 and _AMOUNT.fits(v[1]) and (v[0] is None or _AMOUNT.fits(v[0]))
    ),
)
_ADJUST = _Kind(
    expected="'original', 'match_rms_adamw' or None", fits=lambda v: v in ("original", "match_rms_adamw", None)
)

_ADAM = {"betas": _BETAS, "eps": _AMOUNT, "weight_decay": _AMOUNT, "maximize": _FLAG}
_AVERAGED = {"eps": _AMOUNT, "weight_decay": _AMOUNT, "maximize": _FLAG}
OPTIONS: Mapping[str, Mapping[str, _Kind]] = {
    "sgd": {
        "momentum": _AMOUNT,
        "dampening": _AMOUNT,
        "weight_decay": _AMOUNT,
        "nesterov": _FLAG,
        "maximize": _FLAG,
    },
    "adam": {**_ADAM, "amsgrad": _FLAG, "decoupled_weight_decay": _FLAG},
    "adamw": {**_ADAM, "amsgrad": _FLAG},
    "nadam": {**_ADAM, "momentum_decay": _AMOUNT, "decoupled_weight_decay": _FLAG},
    "radam": {**_ADAM, "decoupled_weight_decay": _FLAG},
    "adamax": _ADAM,
    "adagrad": {**_AVERAGED, "lr_decay": _AMOUNT, "initial_accumulator_value": _AMOUNT},
    "adadelta": {**_AVERAGED, "rho": _FRACTION},
    "rmsprop": {**_AVERAGED, "alpha": _FRACTION, "momentum": _AMOUNT, "centered": _FLAG},
    "asgd": {"lambd": _AMOUNT, "alpha": _AMOUNT, "t0": _AMOUNT, "weight_decay": _AMOUNT, "maximize": _FLAG},
    "rprop": {"etas": _PAIR, "step_sizes": _PAIR, "maximize": _FLAG},
    "adafactor": {
        "beta2_decay": _SIGNED,
        "eps": _ADAFACTOR_EPS,
        "d": _AMOUNT,
        "weight_decay": _AMOUNT,
        "maximize": _FLAG,
    },
    "muon": {
        "weight_decay": _AMOUNT,
        "momentum": _AMOUNT,
        "nesterov": _FLAG,
        "ns_coefficients": _TRIPLE,
        "eps": _AMOUNT,
        "ns_steps": _COUNT,
        "adjust_lr_fn": _ADJUST,
    },
}
"""The optimizers of torch.optim and the options that each takes here, besides `lr`; the names are torch's."""

WHOLE_TENSOR: Mapping[str, str] = {
    "adafactor": "it factors the second moment over whole rows and columns and scales by the norm of the whole update",
    "muon": "it orthogonalises whole matrices",
}
"""Optimizers whose update of one element depends on others: they cannot run on slices of a weight. All others can."""

UNAVAILABLE: Mapping[str, str] = {
    "lbfgs": "it evaluates the loss several times within a step",
    "sparseadam": "it takes sparse gradients, which no program here produces",
    "distro": "that is a way to agree: use optimizer='adamw' with sync='distro'",
    "demo": "that is a way to agree: use optimizer='adamw' with sync='demo'",
    "diloco": "that is a way to agree: use optimizer='adamw' with sync='diloco'",
    "sparseloco": "that is a way to agree: use optimizer='adamw' with sync='sparseloco'",
}

MAX_NAMES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Which optimizer, with which options.

    `no_decay` lists the names of parameters that weight decay leaves alone. `ema` is the decay of an exponential
    moving average of the weights, or None for none. With `sparse`, replicas exchange parts of their updates instead of
    all gradients, and the options are those of AdamW.

    Raises:
        UnsupportedOptionError: a name that this version knows of and does not build, with the reason.
        ConfigError: an unknown name or option, or an option of the wrong type.
    """

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    ema: float | None = None
    sparse: SparseSpec | None = None

    def __post_init__(self) -> None:
        reason = UNAVAILABLE.get(self.name)
        if reason is not None:
            raise UnsupportedOptionError(f"optimizer={self.name!r}: {reason}; use one of {', '.join(OPTIONS)}")
        if self.name not in OPTIONS:
            raise ConfigError(f"optimizer={self.name!r}: expected one of {', '.join(OPTIONS)}")
        check_learning_rate(self.lr)
        for key, value in self.options.items():
            self._check_option(key, value)
        if self.no_decay and "weight_decay" not in OPTIONS[self.name]:
            raise ConfigError(f"optimizer_options has 'no_decay', but {self.name} has no weight decay")
        if self.ema is not None and not (is_finite(self.ema) and 0 <= self.ema < 1):
            raise ConfigError(f"ema={self.ema!r}: expected the decay of the average, a number in [0, 1), or None")
        if self.sparse is not None:
            self._check_sparse(self.sparse.rule)

    def _check_sparse(self, rule: SparseRule) -> None:
        if self.name != "adamw":
            raise UnsupportedOptionError(
                f"optimizer={self.name!r} with sync={rule.value!r}: its update is made of AdamW's options; use "
                "optimizer='adamw' (lr, betas, eps and weight_decay stay as they are)"
            )
        if others := sorted(self.options.keys() - {"betas", "eps", "weight_decay"}):
            raise UnsupportedOptionError(
                f"optimizer_options has {others[0]!r}, which sync={rule.value!r} does not take; it takes betas, eps "
                "and weight_decay"
            )

    def _check_option(self, key: str, value: object) -> None:
        known = OPTIONS[self.name]
        if key not in known:
            raise ConfigError(
                f"optimizer_options has {key!r}, which {self.name} does not take; it takes {', '.join(known)}"
            )
        if not known[key].fits(value):
            raise ConfigError(f"optimizer_options[{key!r}]={value!r}: expected {known[key].expected}")

    @property
    def elementwise(self) -> bool:
        """Whether the update of each element depends on nothing but its own history: it may run on slices."""
        return self.name not in WHOLE_TENSOR

    @property
    def keeps_apart(self) -> bool:
        """Whether replicas differ between two steps: what one holds alone goes when it goes."""
        return self.sparse is not None and (self.sparse.rule.local or self.sparse.delay)

    def require_elementwise(self, why: str) -> None:
        """Raise UnsupportedOptionError for an optimizer that cannot run on slices; `why` says what would slice."""
        if not self.elementwise:
            raise UnsupportedOptionError(
                f"optimizer={self.name!r} with {why}: {WHOLE_TENSOR[self.name]}, and here each rank holds a slice; "
                f"use one of {', '.join(name for name in OPTIONS if name not in WHOLE_TENSOR)}"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "lr": self.lr,
            "options": dict(self.options),
            "no_decay": list(self.no_decay),
            "ema": self.ema,
            "sparse": None if self.sparse is None else self.sparse.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OptimizerSpec:
        """From another process; checked like a user's words."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"optimizer {str(data)[:200]}: expected an object with name, lr and options")
        options, names = data.get("options"), data.get("no_decay", [])
        name, rate = data.get("name"), data.get("lr")
        if not isinstance(options, Mapping) or not isinstance(name, str) or not is_finite(rate):
            raise ConfigError(f"optimizer {str(data)[:200]}: expected name, lr and options")
        sparse = data.get("sparse")
        return cls(
            name=name,
            lr=float(rate),
            options=options,
            no_decay=_names(names),
            ema=data.get("ema"),
            sparse=None if sparse is None else SparseSpec.from_json(sparse),
        )


def check_learning_rate(rate: object) -> float:
    """The rate as a float, or ConfigError."""
    if not is_finite(rate) or rate < 0:
        raise ConfigError(f"lr={str(rate)[:100]}: expected a finite number of at least 0")
    return float(rate)


def _names(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if len(names) > MAX_NAMES or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"no_decay {str(value)[:200]}: expected at most {MAX_NAMES} names of parameters")
    return tuple(names)
