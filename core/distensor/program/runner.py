"""StageRunner: a stage program as a tape over numbered slots, run op by op under ambient autograd."""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from distensor.core.compute import Recompute
from distensor.core.errors import ProgramRejectedError
from distensor.program.axes import Groups, check_groups
from distensor.program.calls import TORCH_DTYPES, resolve
from distensor.program.deferral import Deferral, WeightGradients
from distensor.program.draws import Draws
from distensor.program.expressions import Size, evaluate, show
from distensor.program.recomputation import Recomputation, Segment
from distensor.program.shapes import check_shapes
from distensor.program.stage_program import StageProgram
from distensor.program.tape import Tape, record
from distensor.program.values import InputSpec, Limits, WeightSpec

Environment: TypeAlias = "list[Any]"
_KEPT_BINDINGS = 8
_KEPT_BYTES = 64 << 20


class StageRunner:
    """Runs one stage.

    `parameters` are leaf tensors that collect gradients. With `limits`, every new size of the batch is checked on
    the meta device before it runs, so that no caller can make this process allocate beyond them.
    `axes` are the groups of a program that is one of several. With `split_backward`, a forward pass can put off the
    gradients of weights. `recompute` says what is computed again in the backward pass instead of being kept; the
    collectives of the recomputed part run again too, in the same order on all ranks.
    """

    def __init__(
        self,
        program: StageProgram,
        weights: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        *,
        limits: Limits | None = None,
        axes: Groups | None = None,
        split_backward: bool = False,
        recompute: Recompute = Recompute.NONE,
    ) -> None:
        check_groups(program.axes, axes or {})
        self.program = program
        self.device = torch.device(device)
        self._limits = limits
        self.parameters: dict[str, nn.Parameter] = {
            spec.name: nn.Parameter(_take(spec, weights, self.device), requires_grad=spec.requires_grad)
            for spec in program.parameters
        }
        self.buffers: dict[str, Tensor] = {spec.name: _take(spec, weights, self.device) for spec in program.buffers}
        self._draws = Draws(self.device)
        self._deferral = Deferral() if split_backward else None
        self._tape: Tape = record(program, self._draws, self.device, axes or {}, self._deferral, recompute)
        self._bindings: OrderedDict[tuple[int, ...], Environment] = OrderedDict()
        self._checked: list[tuple[int, ...]] = []
        self._kept: dict[int, int] = {}

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        seed: int | None = None,
        training: bool = True,
        put_off: WeightGradients | None = None,
    ) -> dict[str, Tensor]:
        """Outputs (and loss and weight of the last stage) by name.

        Dropout draws from `seed` alone; `training=False` switches it off. What the backward pass of these outputs
        puts off goes into `put_off`, where the runner splits its backward.
        """
        tape = self._tape
        fixed = self._environment(self._bind(inputs))
        environment = list(fixed)
        for slot, name in tape.inputs:
            environment[slot] = inputs[name]
        self._kept.clear()
        start = functools.partial(self._start, seed, training, put_off)
        start()
        keeps = not torch.is_grad_enabled()
        for segment in tape.segments:
            if segment.inputs is None or keeps:
                _run(tape, segment, environment)
            else:
                self._run_lightly(segment, segment.inputs, environment, fixed, start)
        return {name: environment[slot] for name, slot in tape.results}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the inputs that recomputation kept in the last forward pass, each memory block counted once."""
        return sum(self._kept.values())

    def _start(self, seed: int | None, training: bool, put_off: WeightGradients | None) -> None:
        self._draws.start(seed, training)
        if self._deferral is not None:
            self._deferral.start(put_off)

    def _run_lightly(
        self,
        segment: Segment,
        slots: Sequence[int],
        environment: Environment,
        fixed: Environment,
        start: Callable[[], None],
    ) -> None:
        """Keep nothing but what the segment reads; its backward pass runs it again on that."""
        kept = [(slot, environment[slot]) for slot in slots]
        storages = [value.untyped_storage() for _, value in kept if isinstance(value, Tensor)]
        # By the block's object, not by its address: on the meta device there is none.
        self._kept.update({storage._cdata: storage.nbytes() for storage in storages})

        def again() -> None:
            start()
            own = list(fixed)
            for slot, value in kept:
                own[slot] = _cut_off(value)
            _run(self._tape, segment, own)

        with Recomputation(again):
            _run(self._tape, segment, environment)

    def _bind(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        """The sizes of the dims, read off the inputs; every input must agree with them."""
        dims: dict[str, int] = {}
        for spec in self.program.inputs:
            value = inputs.get(spec.name)
            if value is None:
                raise ProgramRejectedError(f"input {spec.name!r} is missing; got {sorted(inputs)}")
            if value.dtype is not TORCH_DTYPES[spec.dtype] or value.ndim != len(spec.shape):
                _refuse_input(spec, value, dims)
            for extent, size in zip(spec.shape, value.shape, strict=True):
                if isinstance(extent, Size) and isinstance(extent.tree, str):
                    dims.setdefault(extent.tree, size)
        self._check_dims(dims)
        for spec in self.program.inputs:
            value = inputs[spec.name]
            if any(evaluate(extent, dims) != size for extent, size in zip(spec.shape, value.shape, strict=True)):
                _refuse_input(spec, value, dims)
        return dims

    def _check_dims(self, dims: Mapping[str, int]) -> None:
        for dim in self.program.dims:
            size = dims.get(dim.name)
            if size is None:
                raise ProgramRejectedError(f"no input of stage {self.program.stage} shows the size of dim {dim.name!r}")
            if size < dim.minimum or (dim.maximum is not None and size > dim.maximum):
                most = "any" if dim.maximum is None else dim.maximum
                raise ProgramRejectedError(
                    f"dim {dim.name!r} is {size}; this program runs from {dim.minimum} to {most}"
                )

    def _environment(self, dims: dict[str, int]) -> Environment:
        """Weights, literals, sizes and everything that depends on sizes alone, for one binding of the dims."""
        key = tuple(dims[dim.name] for dim in self.program.dims)
        found = self._bindings.get(key)
        if found is not None:
            self._bindings.move_to_end(key)
            return found
        self._check_limits(key, dims)
        environment = self._prepare(dims)
        self._bindings[key] = environment
        while len(self._bindings) > 1 and self._is_full():
            self._bindings.popitem(last=False)
        return environment

    def _check_limits(self, key: tuple[int, ...], dims: Mapping[str, int]) -> None:
        """Sizes no larger than some that passed need no check of their own: cost grows with every dim."""
        covered = any(all(map(operator.le, key, passed)) for passed in self._checked)
        if self._limits is None or covered:
            return
        check_shapes(self.program, self._limits, dims)
        self._checked = [*self._checked[-_KEPT_BINDINGS:], key]

    def _is_full(self) -> bool:
        made = [out for _, _, _, out in self._tape.constant]
        kept = sum(_bytes(environment[slot]) for environment in self._bindings.values() for slot in made)
        return len(self._bindings) > _KEPT_BINDINGS or kept > _KEPT_BYTES

    def _prepare(self, dims: Mapping[str, int]) -> Environment:
        tape = self._tape
        environment: Environment = [None] * tape.slots
        for name, slot in tape.weights:
            environment[slot] = self.parameters[name] if name in self.parameters else self.buffers[name]
        for slot, value in tape.literals:
            environment[slot] = resolve(value, dims)
        with torch.no_grad():
            for function, gather, single, out in tape.constant:
                environment[out] = function(environment[single]) if gather is None else function(*gather(environment))
        return environment


def _cut_off(value: Any) -> Any:
    """The same value for a graph of its own."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _run(tape: Tape, segment: Segment, environment: Environment) -> None:
    steps = iter(tape.steps[segment.start : segment.stop])
    try:
        for function, gather, single, out, free in steps:
            environment[out] = function(environment[single]) if gather is None else function(*gather(environment))
            for slot in free:
                environment[slot] = None
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        position = segment.stop - operator.length_hint(steps) - 1
        error.add_note(f"while running {tape.places[position]}")
        raise


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _take(spec: WeightSpec, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The weight, as this program declares it, on the device and owned by nobody else."""
    value = weights.get(spec.name)
    if value is None:
        raise ProgramRejectedError(f"weight {spec.name!r} is missing")
    if value.dtype is not TORCH_DTYPES[spec.dtype] or tuple(value.shape) != spec.shape:
        raise ProgramRejectedError(
            f"weight {spec.name!r} is {value.dtype} {list(value.shape)}; "
            f"the program declares {spec.dtype} {list(spec.shape)}"
        )
    return value.detach().to(device, copy=True)


def _refuse_input(spec: InputSpec, value: Tensor, dims: Mapping[str, int]) -> None:
    shape = ", ".join(show(extent) for extent in spec.shape)
    raise ProgramRejectedError(
        f"input {spec.name!r} is {value.dtype} {list(value.shape)}; the program takes {spec.dtype} [{shape}] "
        f"with {dict(dims)}"
    )
