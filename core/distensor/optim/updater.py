"""What a rank does with the gradients of its weights: one optimizer step, the average of the weights, their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from distensor.core.errors import ConfigError, TransportError
from distensor.optim.build import build_optimizer, set_learning_rate
from distensor.optim.distro.local import ANCHOR, DiLoCo, LocalSteps
from distensor.optim.distro.protection import Exchanged
from distensor.optim.distro.sparse import RESIDUAL, SparseOptimizer
from distensor.optim.sparse_spec import LOCAL
from distensor.optim.spec import OptimizerSpec

if TYPE_CHECKING:
    from distensor.optim.distro import Exchange

State: TypeAlias = "Mapping[str, Mapping[str, Tensor]]"
"""By parameter: the tensors that go with it, by field. Fields are torch's own, `master` and `ema`."""

MASTER = "master"
EMA = "ema"
_HALF = (torch.bfloat16, torch.float16)


class Updater:
    """Updates `parameters` by their gradients as `spec` says.

    A parameter of a half-precision dtype gets a master copy in fp32, which the optimizer updates and which is rounded
    into the parameter after each step: updates smaller than the parameter's resolution are not lost. The moving
    average, where asked for, is kept in fp32 (or wider, where the parameter is) and starts at the present weights.

    Args:
        parameters: by key, which ends in the parameter's name after an optional "stage/". Frozen ones are left out.
        exchange: the other replicas, where `spec.sparse` is set: the gradients are then this replica's own.

    Raises:
        ConfigError: options that torch refuses together.
    """

    def __init__(self, spec: OptimizerSpec, parameters: Mapping[str, Tensor], exchange: Exchange | None = None) -> None:
        self.spec = spec
        self._parameters = {key: p for key, p in parameters.items() if p.requires_grad}
        self._targets = {key: _target(p) for key, p in self._parameters.items()}
        self._half = [key for key, p in self._parameters.items() if self._targets[key] is not p]
        self._optimizer = build_optimizer(self._in_groups(), self._targets, exchange)
        self._averages = {} if spec.ema is None else {key: t.detach().clone() for key, t in self._targets.items()}

    def _in_groups(self) -> OptimizerSpec:
        """The spec with `no_decay` by key instead of by name."""
        kept = set(self.spec.no_decay)
        return replace(self.spec, no_decay=tuple(key for key in self._parameters if name_of(key) in kept))

    def step(self, lr: float, scale: float = 1.0, *, exchange: bool = True, only: Set[str] | None = None) -> None:
        """One update by `scale` times the gradients in `.grad`, which are changed by it. Without one: no change.

        Args:
            exchange: whether replicas that take steps of their own exchange now what came of them.
            only: these parameters; of all others the gradient is put away, and nothing else happens to them.
        """
        for key in self._parameters.keys() - (self._parameters.keys() if only is None else only):
            self._parameters[key].grad = self._targets[key].grad = None
        for key in self._half:
            gradient = self._parameters[key].grad
            self._targets[key].grad = None if gradient is None else gradient.to(self._targets[key].dtype)
        gradients = [target.grad for target in self._targets.values() if target.grad is not None]
        if gradients and scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        set_learning_rate(self._optimizer, lr)
        if isinstance(self._optimizer, LocalSteps):
            self._optimizer.advance(exchange=exchange)
        elif self._optimizer is not None:
            self._optimizer.step()
        self._round_masters()
        self._average(self._averages.keys() if only is None else only)

    def exchange(self) -> None:
        """What replicas do that take steps of their own, without one."""
        if isinstance(self._optimizer, LocalSteps):
            self._optimizer.exchange()
            self._round_masters()

    def settle(self) -> None:
        """End an exchange that is on its way, together with the other replicas: all have the same weights then, but
        for steps that each takes on its own."""
        if isinstance(self._optimizer, SparseOptimizer):
            self._optimizer.settle()
            self._round_masters()

    def part(self) -> None:
        """The members have changed: an exchange that is on its way is applied where all of it came here, and undone
        where it did not. Nothing is asked of others."""
        with suppress(TransportError, RuntimeError):  # as torch reports a peer that went away
            self.settle()

    @property
    def exchanges(self) -> int:
        """How many exchanges are in the weights that all replicas have in common; where gradients are summed, none."""
        optimizer = self._optimizer
        return optimizer.applied if isinstance(optimizer, SparseOptimizer | DiLoCo) else 0

    def handed_on(self) -> State:
        """Of `state`, what another replica may go on from: all but what this one alone has still to send, and the
        steps that it has taken since the last exchange."""
        return {
            key: {field: value for field, value in fields.items() if field not in (RESIDUAL, LOCAL)}
            for key, fields in self.state().items()
        }

    def adopt(self, weights: Mapping[str, Tensor], state: State, exchanges: int, *, fresh: bool) -> None:
        """Stand where another replica stands after so many exchanges, which gave its common `weights` and what it has
        `handed_on`. What is this replica's own stays, but for steps since the last exchange; unless it is `fresh`.

        Raises:
            ConfigError: as `load_state` does.
        """
        check_names(state, self._parameters)
        self._overwrite({key: tensor for key, tensor in weights.items() if key in self._parameters})
        self.load_state({key: self._adopted(key, fields, fresh=fresh) for key, fields in state.items()})
        if isinstance(self._optimizer, SparseOptimizer | DiLoCo):
            self._optimizer.applied = exchanges

    def _adopted(self, key: str, given: Mapping[str, Tensor], *, fresh: bool) -> dict[str, Tensor]:
        own = frozenset[str]() if fresh or self.spec.sparse is None else self.spec.sparse.own_fields
        mine = {field: value for field, value in self._state_of(key).items() if field in own}
        fields, layout = {**given, **mine}, self.layout(key)
        if RESIDUAL in layout and fields.keys() - {MASTER, EMA}:
            dtype, shape = layout[RESIDUAL]
            fields.setdefault(RESIDUAL, torch.zeros(shape, dtype=dtype))
        if LOCAL in layout and ANCHOR in fields:
            fields[LOCAL] = fields[ANCHOR]
            if MASTER in layout:
                fields[MASTER] = fields[ANCHOR]
        return fields

    @property
    def exchanged(self) -> Exchanged | None:
        """What there was to notice about the newest exchange; None where nothing is exchanged but gradients."""
        return self._optimizer.exchanged if isinstance(self._optimizer, SparseOptimizer | DiLoCo) else None

    def common(self) -> dict[str, Tensor]:
        """The weights that all replicas have in common, where this one has left them for steps of its own."""
        optimizer = self._optimizer
        if not isinstance(optimizer, LocalSteps):
            return {}
        return {key: optimizer.anchor_of(t).to(self._parameters[key].dtype) for key, t in self._targets.items()}

    @contextmanager
    def at_common(self) -> Iterator[None]:
        """Within it, the parameters are what all replicas have in common."""
        common = self.common()
        own = {key: self._parameters[key].detach().clone() for key in common}
        self._overwrite(common)
        try:
            yield
        finally:
            self._overwrite(own)

    def _overwrite(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for key, tensor in tensors.items():
                self._parameters[key].copy_(tensor)

    def _round_masters(self) -> None:
        with torch.no_grad():
            for key in self._half:
                self._targets[key].grad = None
                self._parameters[key].copy_(self._targets[key])

    def _average(self, keys: Set[str]) -> None:
        averages, local = [own for key, own in self._averages.items() if key in keys], self._optimizer
        if self.spec.ema is None or not averages:
            return
        now = [
            local.anchor_of(t).to(t.dtype) if isinstance(local, LocalSteps) else t.detach()
            for key, t in self._targets.items()
            if key in keys
        ]
        with torch.no_grad():
            torch._foreach_mul_(averages, self.spec.ema)
            torch._foreach_add_(averages, now, alpha=1.0 - self.spec.ema)

    def averages(self) -> dict[str, Tensor]:
        """The moving average by key; empty where none is kept."""
        return dict(self._averages)

    def refresh(self, keys: Set[str]) -> None:
        """These parameters were overwritten from outside: their masters and averages start from them again."""
        with torch.no_grad():
            for key in keys & self._parameters.keys():
                if key in self._half:
                    self._targets[key].copy_(self._parameters[key])
                if key in self._averages:
                    self._averages[key].copy_(self._parameters[key])
                if isinstance(self._optimizer, LocalSteps):
                    target = self._targets[key]
                    fields = self._optimizer.fields(target)
                    fields[ANCHOR] = fields[LOCAL] = target.detach().clone()
                    self._optimizer.load_fields(target, fields)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything but the parameters that the next steps depend on. The tensors are the living ones."""
        return {key: self._state_of(key) for key in self._parameters}

    def _state_of(self, key: str) -> dict[str, Tensor]:
        target = self._targets[key]
        own: Mapping[str, Any] = {} if self._optimizer is None else self._optimizer.state.get(target, {})
        if isinstance(self._optimizer, LocalSteps):
            own = self._optimizer.fields(target)
        state = {field: value for field, value in own.items() if isinstance(value, Tensor)}
        if key in self._half:
            state[MASTER] = target.detach()
        if key in self._averages:
            state[EMA] = self._averages[key]
        return state

    def load_state(self, state: State) -> None:
        """Take over what `state` returned, here or elsewhere. A parameter without fields has never had a gradient.

        Raises:
            ConfigError: parameters or fields that are missing or that are not this optimizer's, or another shape.
        """
        check_names(state, self._parameters)
        layouts = {key: self.layout(key) for key in self._parameters}
        for key, fields in state.items():
            check_fields(key, fields, layouts[key])
        for key, fields in state.items():
            self._load_one(key, fields)

    def take_over(self, key: str, fields: Mapping[str, Tensor]) -> None:
        """Like `load_state`, for one parameter, whose value has been replaced."""
        check_fields(key, fields, self.layout(key))
        self.refresh({key})
        self._load_one(key, fields)

    @property
    def trainable(self) -> Mapping[str, Tensor]:
        """The parameters that are updated."""
        return self._parameters

    @property
    def keys(self) -> Set[str]:
        """Of the trainable parameters."""
        return self._parameters.keys()

    def layout(self, key: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each field that the state of one parameter has once it was updated."""
        parameter = self._parameters[key]
        return state_layout(self.spec, parameter.dtype, tuple(parameter.shape))

    def _load_one(self, key: str, fields: Mapping[str, Tensor]) -> None:
        target = self._targets[key]
        own = {field: value for field, value in fields.items() if field not in (MASTER, EMA)}
        with torch.no_grad():
            if key in self._half:
                target.copy_(fields[MASTER])
            if key in self._averages:
                self._averages[key].copy_(fields[EMA])
        if isinstance(self._optimizer, LocalSteps):
            self._optimizer.load_fields(target, own)
            self._overwrite({key: target.detach()})
        elif self._optimizer is not None:
            self._optimizer.state.pop(target, None)
            if own:
                self._optimizer.state[target] = {field: _like(target, value) for field, value in own.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all state, the parameters not counted."""
        named = [(field, value) for fields in self.state().values() for field, value in fields.items()]
        return sum(value.nbytes for field, value in named if field != LOCAL)  # those are the parameters


def name_of(key: str) -> str:
    """The parameter's name in a key "stage/name"; a name holds no slash."""
    return key.rpartition("/")[2]


def state_layout(
    spec: OptimizerSpec, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each field that goes with a parameter of `dtype` and `shape` after its first update.

    Found by trying the optimizer on a small parameter with as many dims: each dim of a state is the parameter's own,
    or 1.
    """
    kept = kept_dtype(dtype)
    fields = {
        field: (found, tuple(size if small > 1 else 1 for size, small in zip(shape, sizes, strict=False)))
        for field, (found, sizes) in _probe(spec, kept, len(shape)).items()
    }
    if kept is not dtype:
        fields[MASTER] = (kept, shape)
    if spec.ema is not None:
        fields[EMA] = (kept, shape)
    return fields


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype masters, averages and the optimizer's tensors of a parameter of `dtype` are."""
    return torch.float32 if dtype in _HALF else dtype


def check_names(state: State, expected: Mapping[str, object]) -> None:
    """Raise ConfigError unless `state` is of exactly these parameters."""
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unknown:
        raise ConfigError(
            f"optimizer state: it lacks {missing[:5]} and holds {[name[:100] for name in unknown[:5]]}, "
            "which are no trainable parameters here"
        )


def check_fields(
    key: str, fields: Mapping[str, Tensor], layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Raise ConfigError unless `fields` are those of `layout`, or only the ones that exist before the first update."""
    before = layout.keys() & {MASTER, EMA}
    if fields.keys() not in (layout.keys(), before):
        raise ConfigError(
            f"optimizer state of {key!r} has {sorted(name[:100] for name in fields)}; expected {sorted(layout)}"
        )
    for field, value in fields.items():
        if (value.dtype, tuple(value.shape)) != layout[field]:
            raise ConfigError(
                f"optimizer state of {key!r}: {field} is {value.dtype} {tuple(value.shape)}; "
                f"expected {layout[field][0]} {layout[field][1]}"
            )


def _probe(spec: OptimizerSpec, dtype: torch.dtype, dims: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    parameter = torch.nn.Parameter(torch.ones(tuple(range(2, 2 + dims)), dtype=dtype))
    optimizer = build_optimizer(spec, {"": parameter})
    assert optimizer is not None, "one parameter to train"
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if isinstance(optimizer, SparseOptimizer):
        optimizer.settle()
    state = optimizer.fields(parameter) if isinstance(optimizer, LocalSteps) else optimizer.state[parameter]
    return {field: (value.dtype, tuple(value.shape)) for field, value in state.items() if isinstance(value, Tensor)}


def _target(parameter: Tensor) -> Tensor:
    kept = kept_dtype(parameter.dtype)
    return parameter if kept is parameter.dtype else torch.nn.Parameter(parameter.detach().to(kept))


def _like(target: Tensor, value: Tensor) -> Tensor:
    """A copy where torch keeps it: counters on the CPU, everything else beside the weight."""
    return value.detach().to(device=target.device if value.dim() else "cpu", copy=True)
