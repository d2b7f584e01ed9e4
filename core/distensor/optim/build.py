"""Building an optimizer of torch.optim from its spec, and the words of a user into a spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from distensor.core.errors import ConfigError
from distensor.nn.patterns import listed, nearest, parse
from distensor.optim.sparse_spec import SparseRule, SparseSpec
from distensor.optim.spec import OptimizerSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from distensor.optim.distro import Exchange

FUSED = frozenset({"adam", "adamw"})
"""Optimizers that run as one kernel for each weight: a quarter of the time of torch's default, one pass over memory
instead of a dozen. Every element gets the same arithmetic in the same order but for the rounding of single operations
(1e-7 a step); it depends on the weight's shape and the machine's vector instructions, not on its number of threads, so
ranks that hold the same weight keep the same bits. The others gain little, or have no such kernel on a CPU.
"""


def make_spec(
    name: str,
    lr: float,
    options: Mapping[str, Any],
    ema: float | None,
    parameters: Mapping[str, Tensor],
) -> OptimizerSpec:
    """A user's words as a spec for a model with these `parameters`.

    `options` are those of torch.optim, and `no_decay`: patterns of the parameters that weight decay leaves alone.

    Raises:
        ConfigError: an option or a pattern that fits nothing, or options that torch refuses together.
        UnsupportedOptionError: as OptimizerSpec.
    """
    own = {key: value for key, value in options.items() if key != "no_decay"}
    spec = OptimizerSpec(
        name=name, lr=lr, options=own, no_decay=_match(options.get("no_decay", ()), parameters), ema=ema
    )
    if name == "muon":
        _check_matrices(parameters)
    check_optimizer(spec)
    return spec


def build_optimizer(
    spec: OptimizerSpec, parameters: Mapping[str, Tensor], exchange: Exchange | None = None
) -> Optimizer | None:
    """The optimizer over `parameters` by name, or None where there is nothing to train (a frozen stage).

    Args:
        exchange: the replicas, where `spec.sparse` says that they exchange updates; by default this one is alone.
    """
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    bare = set(spec.no_decay)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trainable.items() if name not in bare]},
        {"params": [p for name, p in trainable.items() if name in bare], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.options.items()}
    if spec.name in FUSED and spec.sparse is None:
        options["fused"] = True
    try:
        if spec.sparse is not None:
            return _sparse(spec.sparse, groups, spec.lr, options, exchange)
        return _classes()[spec.name](groups, lr=spec.lr, **options)
    except ValueError as error:
        raise ConfigError(f"optimizer {spec.name!r} with {dict(spec.options)}: {error}") from error


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raise ConfigError for options that torch refuses together, before any worker hears of them."""
    import torch

    build_optimizer(spec, {"": torch.nn.Parameter(torch.zeros(1, 1))})


def set_learning_rate(optimizer: Optimizer | None, rate: float) -> None:
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def _classes() -> Mapping[str, Callable[..., Optimizer]]:
    from torch import optim

    return {
        "sgd": optim.SGD,
        "adam": optim.Adam,
        "adamw": optim.AdamW,
        "nadam": optim.NAdam,
        "radam": optim.RAdam,
        "adamax": optim.Adamax,
        "adagrad": optim.Adagrad,
        "adadelta": optim.Adadelta,
        "rmsprop": optim.RMSprop,
        "asgd": optim.ASGD,
        "rprop": optim.Rprop,
        "adafactor": optim.Adafactor,
        "muon": optim.Muon,
    }


def _sparse(
    sparse: SparseSpec, groups: list[dict[str, Any]], lr: float, options: Mapping[str, Any], exchange: Exchange | None
) -> Optimizer:
    from distensor.optim.distro import DeMo, DiLoCo, DisTrOAdamW, SparseLoCo
    from distensor.optim.distro.exchange import Alone

    where: dict[str, Any] = {"exchange": exchange or Alone()}
    entries = {"k": sparse.k, "chunk": sparse.chunk, "value_bits": sparse.value_bits}
    shared: dict[str, Any] = {**where, **entries, "clip_messages": sparse.clip_messages}
    match sparse.rule:
        case SparseRule.DISTRO:
            return DisTrOAdamW(groups, lr=lr, delay=sparse.delay, **options, **shared)
        case SparseRule.DEMO:
            # Of AdamW's options DeMo has the weight decay; no second moment is there that the others would shape.
            decay = options.get("weight_decay", 1e-2)
            return DeMo(groups, lr=lr, decay=sparse.decay, weight_decay=decay, delay=sparse.delay, **shared)
        case SparseRule.DILOCO:
            outer: dict[str, Any] = {
                "outer_lr": sparse.outer_lr,
                "outer_momentum": sparse.outer_momentum,
                "average": sparse.average,
            }
            return DiLoCo(groups, lr=lr, every=sparse.every, **options, **outer, **where)
        case SparseRule.SPARSELOCO:
            own: dict[str, Any] = {"every": sparse.every, "outer_lr": sparse.outer_lr, "feedback": sparse.feedback}
            return SparseLoCo(groups, lr=lr, **options, **own, **shared)


def _match(patterns: object, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise ConfigError(f"optimizer_options['no_decay']={patterns!r}: expected a list of patterns of parameters")
    known = list(names)
    found: dict[str, None] = {}
    for text in patterns:
        pattern = parse(text)
        matched = [name for name in known if pattern.covers(name)]
        if not matched:
            why = pattern.problem or f"no parameter fits; the nearest are {listed(nearest(text, known))}"
            raise ConfigError(f"optimizer_options['no_decay'] has {text!r}: {why}")
        found.update(dict.fromkeys(matched))
    return tuple(found)


def _check_matrices(parameters: Mapping[str, Tensor]) -> None:
    others = [name for name, tensor in parameters.items() if tensor.requires_grad and tensor.dim() != 2]
    if others:
        raise ConfigError(
            f"optimizer='muon' updates matrices only; {listed(others)} have another number of dims: "
            "freeze them or use another optimizer"
        )
