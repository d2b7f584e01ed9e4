"""Optimizers of torch.optim by name. The name and the options travel; the class never does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.core.errors import ConfigError, UnsupportedOptionError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

OPTIONS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "sgd": {
        "momentum": (int, float),
        "dampening": (int, float),
        "weight_decay": (int, float),
        "nesterov": bool,
    },
    "adamw": {
        "betas": (list, tuple),
        "eps": (int, float),
        "weight_decay": (int, float),
        "amsgrad": bool,
    },
}
"""The optimizers of this version and the options that each takes, besides `lr`."""

LATER = ("adam", "adagrad", "rmsprop", "adamax", "nadam", "radam", "adafactor", "muon", "lbfgs", "distro", "demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Which optimizer, with which options.

    Raises:
        UnsupportedOptionError: a name that this version knows of and does not build.
        ConfigError: an unknown name or option, or an option of the wrong type.
    """

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in LATER:
            raise UnsupportedOptionError(
                f"optimizer={self.name!r} is not implemented in this version; use one of {', '.join(OPTIONS)}"
            )
        if self.name not in OPTIONS:
            raise ConfigError(f"optimizer={self.name!r}: expected one of {', '.join(OPTIONS)}")
        check_learning_rate(self.lr)
        for key, value in self.options.items():
            self._check_option(key, value)

    def _check_option(self, key: str, value: object) -> None:
        known = OPTIONS[self.name]
        if key not in known:
            raise ConfigError(
                f"optimizer_options has {key!r}, which {self.name} does not take; it takes {', '.join(known)}"
            )
        wanted = known[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"optimizer_options[{key!r}]={value!r}: expected {_names(wanted)}")
        if key == "betas":
            _check_betas(value)
        elif not isinstance(value, bool) and not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
            raise ConfigError(f"optimizer_options[{key!r}]={value!r}: expected a finite number of at least 0")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "lr": self.lr, "options": dict(self.options)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OptimizerSpec:
        """From another process; checked like a user's words."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"optimizer {str(data)[:200]}: expected an object with name, lr and options")
        options = data.get("options")
        name, rate = data.get("name"), data.get("lr")
        if not isinstance(options, Mapping) or not isinstance(name, str) or not isinstance(rate, int | float):
            raise ConfigError(f"optimizer {str(data)[:200]}: expected name, lr and options")
        return cls(name=name, lr=float(rate), options=options)


def check_learning_rate(rate: object) -> float:
    """The rate as a float, or ConfigError."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise ConfigError(f"lr={rate!r}: expected a finite number of at least 0")
    return float(rate)


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[Tensor]) -> Optimizer | None:
    """The optimizer over `parameters`, or None where there is nothing to train (a frozen stage)."""
    import torch

    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return None
    classes: dict[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    options = {key: tuple(value) if key == "betas" else value for key, value in spec.options.items()}
    try:
        return classes[spec.name](trainable, lr=spec.lr, **options)
    except ValueError as error:
        raise ConfigError(f"optimizer {spec.name!r} with {dict(spec.options)}: {error}") from error


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raise ConfigError for options that torch refuses together, before any worker hears of them."""
    import torch

    build_optimizer(spec, [torch.nn.Parameter(torch.zeros(1))])


def set_learning_rate(optimizer: Optimizer | None, rate: float) -> None:
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def _check_betas(value: object) -> None:
    betas = list(value) if isinstance(value, list | tuple) else []
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optimizer_options['betas']={value!r}: expected two numbers in [0, 1)")


def _names(wanted: type | tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in (wanted if isinstance(wanted, tuple) else (wanted,)))
