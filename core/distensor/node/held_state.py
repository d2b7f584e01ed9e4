"""What one rank holds between steps: stages, weights and the optimizer's state; looked at, handed out, overwritten."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.node.filling import Filling
from distensor.node.orders import chosen
from distensor.node.step_report import Update
from distensor.optim.sharing import part_state, whole_state
from distensor.sync import keyed

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core.parallel import Coordinates
    from distensor.node.orders import JobPlan
    from distensor.optim.updater import State, Updater
    from distensor.program import StageRunner
    from distensor.sync import WeightStore


class HeldState:
    """Of a rank whose stages are loaded. An update that was decided may still be owed: whoever looks settles it."""

    _plan: JobPlan
    _place: Coordinates
    _updater: Updater

    def __init__(self) -> None:
        self._runners: dict[int, StageRunner] = {}
        self._store: WeightStore | None = None
        self._owed: Update | None = None
        self.filling: Filling | None = None  # what is not here yet, while this rank takes part already

    @property
    def own_stages(self) -> list[int]:
        return sorted(self._runners)

    @property
    def trained(self) -> list[str]:
        """The parameters that have an optimizer's state, by "stage/name"."""
        return [key for key, parameter in self._weights.updated.items() if parameter.requires_grad]

    @property
    def trained_elements(self) -> int:
        """Of the whole parameters that this rank has gradients of."""
        parameters = keyed({stage: runner.parameters for stage, runner in self._runners.items()})
        return sum(math.prod(self._weights.shape(key)) for key, p in parameters.items() if p.requires_grad)

    @property
    def _weights(self) -> WeightStore:
        """As they are after all steps so far."""
        assert self._store is not None, "a load command comes first"
        self.settle()
        return self._store

    @property
    def _settled(self) -> WeightStore:
        """`_weights` once no exchange of replicas is on its way; all ranks ask for it together."""
        weights = self._weights
        self._updater.settle()
        return weights

    def settle(self) -> None:
        """Carry out the update that the last step decided on, unless that has been done."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        if self.filling is None:
            self._updater.step(owed.lr, owed.scale, exchange=owed.exchange)
        else:
            self.filling.carry_out(owed)

    def exchange(self) -> None:
        """Replicas that take steps of their own exchange what came of them since the last time."""
        self.settle()
        self._updater.exchange()

    def state(self, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Parameters and buffers by "stage/name": the `wanted` ones, by default all; what all replicas have in common.

        Raises:
            ProgramRejectedError: one that is not here.
        """
        weights = self._settled
        whole = weights.whole({**weights.updated, **self._updater.common()})
        named = {key: tensor.detach() for key, tensor in (whole | self._buffers()).items()}
        return named if wanted is None else chosen(named, wanted)

    def kept(self, wanted: Sequence[str]) -> tuple[dict[str, Tensor], State]:
        """What this rank itself keeps of the `wanted` weights, and of the optimizer's state of each: flat parts where
        the weights are cut. Of replicas that keep their own gradients, each but the first has only what is its own.
        Raises ProgramRejectedError for a weight that is not here.
        """
        held = {**self._settled.updated, **self._updater.common(), **self._buffers()}
        mine = chosen({key: tensor.detach() for key, tensor in held.items()}, wanted)
        state = {key: fields for key, fields in self._updater.state().items() if key in mine}
        sparse = self._plan.optimizer.sparse
        if sparse is None or self._place.dp == 0:
            return mine, state
        own = {key: {name: fields[name] for name in fields.keys() & sparse.own_fields} for key, fields in state.items()}
        return {}, own

    def everything(self) -> tuple[dict[str, Tensor], State]:
        """What another rank of this place needs to go on from here: weights and buffers, and the optimizer's state."""
        held = {**self._weights.updated, **self._buffers()}
        return {key: tensor.detach() for key, tensor in held.items()}, self._updater.state()

    def everything_of(self, keys: Sequence[str]) -> tuple[dict[str, Tensor], State]:
        """Of `everything`, the weights and buffers `keys` and their state.

        Raises:
            ProgramRejectedError: one that is not here.
        """
        weights, state = self.everything()
        return chosen(weights, keys), {key: fields for key, fields in state.items() if key in set(keys)}

    def await_weights(self) -> None:
        """Programs are here; all weights are still to come from other ranks."""
        self.filling = Filling(self.everything()[0], self._updater)

    def sizes_of(self, key: str) -> dict[str, int]:
        """The most elements that the weight `key` (under "") and each field of its state have."""
        weight = self.everything()[0][key]
        fields = self._updater.layout(key) if key in self._updater.keys else {}
        return {"": weight.numel(), **{name: math.prod(shape) for name, (_, shape) in fields.items()}}

    def fill(self, key: str, weight: Tensor, fields: Mapping[str, Tensor]) -> None:
        """A weight that was missing has come, with its state.

        Raises:
            ProgramRejectedError: it does not fit.
        """
        self.settle()
        assert self.filling is not None, "something is missing"
        try:
            self.filling.fill(key, weight, fields)
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error
        if not self.filling.left:
            self.filling = None

    def handed_on(self) -> tuple[dict[str, Tensor], State]:
        """`everything` that is not this replica's own, where replicas exchange updates."""
        held = {**self._weights.updated, **self._updater.common(), **self._buffers()}
        return {key: tensor.detach() for key, tensor in held.items()}, self._updater.handed_on()

    @property
    def exchanges(self) -> int:
        """How many exchanges of replicas are in what they have in common."""
        return self._updater.exchanges

    @property
    def exchanging(self) -> bool:
        """Whether replicas keep their own gradients and exchange updates."""
        return self._updater.spec.sparse is not None

    def adopt(self, tensors: Mapping[str, Tensor], state: State, exchanges: int, *, fresh: bool) -> None:
        """Stand where another replica stands, which gave what it has `handed_on`.

        Raises:
            ProgramRejectedError: state that does not fit.
        """
        self.settle()
        try:
            self._updater.adopt(tensors, state, exchanges, fresh=fresh)
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers by "stage/name". Raises ProgramRejectedError for a name or shape of none."""
        parameters = keyed({stage: runner.parameters for stage, runner in self._runners.items()})
        buffers = self._buffers()
        for key, tensor in tensors.items():
            target = (parameters | buffers).get(key)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ProgramRejectedError(f"replace {key!r} with {found}: no such weight here")
            if key in buffers:
                target.copy_(tensor)
            else:
                self._settled.updated[key].detach().copy_(self._weights.part(key, tensor))
        self._updater.refresh(tensors.keys())

    def averages(self, wanted: Sequence[str]) -> dict[str, Tensor]:
        """The moving average of the `wanted` trainable parameters by "stage/name".

        Raises ProgramRejectedError: one that is not here, or no average is kept.
        """
        weights = self._settled  # first: it settles, and the averages follow the weights
        return chosen(weights.whole(self._updater.averages()), wanted)

    def optimizer_state(self) -> State:
        """By "stage/name" of each trainable parameter: what else the next steps depend on, by field."""
        weights = self._settled  # first: it settles what the state is of
        return whole_state(self._updater.state(), weights)

    def load_optimizer_state(self, state: State) -> None:
        """Go on from what `optimizer_state` returned. Raises ProgramRejectedError for a state that does not fit."""
        weights = self._settled  # first: what is owed is not to be added to the new state
        try:
            self._updater.load_state(part_state(state, weights, self._updater))
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error

    def _buffers(self) -> dict[str, Tensor]:
        return keyed({stage: runner.buffers for stage, runner in self._runners.items()})
