"""ZeRO-3: each rank of a group keeps a part of every weight, and of everything that goes with it.

The whole weights of a stage exist while the stage is used: gathered when the executor turns to it, given back when it
turns to another one. Its gradients are summed and cut at that moment too. So the unit is the stage, and who wants
smaller units declares more stages than ranks. With one stage on a rank it is gathered once and reduced once in a step,
whatever the number of micro-batches. After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", stage 3.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distensor.core.layouts import even_lengths
from distensor.sync.stores import Held, Stages

_ALIGNMENT = 64
"""Bytes: gathered weights start where freshly allocated ones do, so that kernels take the same paths."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Place:
    """One parameter within the flat weights of its unit: [start, start + parameter.numel())."""

    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reduction:
    """A sum that is on its way; `bytes` are held until it is there."""

    work: dist.Work
    total: Tensor
    bytes: int


class _Unit:
    """Parameters of one stage, dtype and kind (trained or frozen) that are cut, gathered and reduced together.

    Laid out flat, one after the other, and cut into contiguous parts as even as possible. `whole` is that flat tensor;
    the parameters are views of it for ever, and its storage is empty while the stage is not used: autograd and the
    programs keep the same parameter objects. What this rank keeps, `own`, lies elsewhere.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.places: dict[str, _Place] = {}
        first = next(iter(parameters.values()))
        step, total = max(_ALIGNMENT // first.element_size(), 1), 0
        for key, parameter in parameters.items():
            self.places[key] = _Place(parameter=parameter, start=total)
            total += -(-parameter.numel() // step) * step
        self.trained = first.requires_grad
        self._group = group
        self._sizes = even_lengths(total, group.size())
        self._first = sum(self._sizes[: group.rank()])
        self.whole = first.detach().new_zeros(total)
        self._adopt()
        self.own = self._mine(self.whole).clone()
        self.gradient: Tensor | None = None
        self.updated = {key: self._shard(place) for key, place in self.places.items()}
        self._arriving: dist.Work | None = None
        self._leaving: _Reduction | None = None
        self.free()

    def _adopt(self) -> None:
        """The parameters become views of the flat tensor, which takes their values."""
        for place in self.places.values():
            view = self.whole[place.start : place.stop].view(place.parameter.shape)
            view.copy_(place.parameter.detach())
            place.parameter.data = view

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.narrow(0, self._first, self._sizes[self._group.rank()])

    def _range(self, place: _Place) -> tuple[int, int]:
        """The part of one parameter that is this rank's, as a range of `own`; empty where it has none."""
        start = max(place.start - self._first, 0)
        stop = min(place.stop - self._first, self._sizes[self._group.rank()])
        return (start, stop) if start < stop else (0, 0)

    def _shard(self, place: _Place) -> nn.Parameter:
        start, stop = self._range(place)
        return nn.Parameter(self.own[start:stop], requires_grad=self.trained)

    def part(self, key: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor in the shape of the parameter, flat."""
        place = self.places[key]
        start, stop = self._range(place)
        shift = self._first - place.start
        return whole.detach().reshape(-1)[start + shift : stop + shift] if start < stop else whole.new_empty(0)

    @property
    def bytes(self) -> int:
        """Of the whole weights."""
        return self.whole.numel() * self.whole.element_size()

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def fetch(self) -> None:
        """Start to gather the whole weights."""
        self.whole.untyped_storage().resize_(self.bytes)
        self._arriving = self._join(self.own, self.whole)

    def arrive(self) -> None:
        """Wait for the whole weights, whether or not they are on their way."""
        if self._arriving is None:
            self.fetch()
        assert self._arriving is not None, "it was just started"
        self._arriving.wait()
        self._arriving = None

    def _join(self, own: Tensor, whole: Tensor) -> dist.Work:
        parts = list(torch.split(whole, list(self._sizes)))
        work: dist.Work | None = dist.all_gather(parts, own, group=self._group, async_op=True)
        assert work is not None, "this rank is a member"
        return work

    def drop(self) -> None:
        """What was fetched is not wanted any longer."""
        if self._arriving is not None:
            self.arrive()
            self.free()

    @property
    def passing_bytes(self) -> int:
        """Of gradients that are being summed."""
        return 0 if self._leaving is None else self._leaving.bytes

    def reduce(self) -> None:
        """Start to sum and cut the gradients over the group; the whole ones go away."""
        flat = self.whole.new_zeros(self.whole.numel())
        for place in self.places.values():
            gradient, place.parameter.grad = place.parameter.grad, None
            if gradient is not None:
                flat[place.start : place.stop].copy_(gradient.detach().reshape(-1))
        total = torch.empty_like(self.own)
        parts = list(torch.split(flat, list(self._sizes)))
        work: dist.Work | None = dist.reduce_scatter(total, parts, group=self._group, async_op=True)
        assert work is not None, "this rank is a member"
        self._leaving = _Reduction(work=work, total=total, bytes=flat.nbytes + total.nbytes)

    def collect(self) -> None:
        """Wait for the sums that were started, if any, and add this rank's part to what there is."""
        if self._leaving is not None:
            self._leaving.work.wait()
            total = self._leaving.total
            self.gradient = total if self.gradient is None else self.gradient.add_(total)
            self._leaving = None

    def hand_out(self, used: Mapping[str, bool]) -> None:
        """The sums into the `.grad` of what the optimizer updates; None where nobody in the group had a gradient."""
        gradient = torch.zeros_like(self.own) if self.gradient is None else self.gradient
        for key, shard in self.updated.items():
            start, stop = self._range(self.places[key])
            shard.grad = gradient[start:stop] if used[key] else None

    def join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors from everybody's parts; all of one dtype."""
        own = next(iter(parts.values())).new_zeros(self.own.numel())
        for key, part in parts.items():
            start, stop = self._range(self.places[key])
            own[start:stop].copy_(part.detach())
        whole = own.new_empty(self.whole.numel())
        self._join(own, whole).wait()
        found = {key: (self.places[key], whole[self.places[key].start : self.places[key].stop]) for key in parts}
        return {key: flat.view(place.parameter.shape) for key, (place, flat) in found.items()}


class ShardedWeights:
    """A `WeightStore` in which each rank of `group` keeps its part of every parameter of its stages.

    Making it cuts the parameters, which are the programs' own: outside of a stage's use they hold nothing.

    Args:
        alone: keys of parameters that are cut by themselves, so that their parts depend on their size alone: tied
            weights, whose copies lie in different stages.
    """

    cut = True

    def __init__(self, stages: Stages, group: dist.ProcessGroup, alone: Collection[str] = ()) -> None:
        self._group = group
        self._alone = alone
        self._units: dict[int, list[_Unit]] = {}
        self._stage: int | None = None
        self._coming: deque[int] = deque()
        self._growing = False
        self._peak = 0
        self._had: dict[str, bool] = {}
        self._unit_of: dict[str, _Unit] = {}
        for stage in sorted(stages):
            self.add(stage, stages[stage])

    def add(self, stage: int, parameters: Mapping[str, Tensor]) -> None:
        """Cut one more stage; all ranks add theirs in the same order."""
        units = self._units[stage] = _make_units(stage, parameters, self._group, self._alone)
        self._unit_of.update({key: unit for unit in units for key in unit.places})

    def _all_units(self) -> Iterator[_Unit]:
        return itertools.chain.from_iterable(self._units.values())

    @property
    def updated(self) -> Mapping[str, Tensor]:
        return {key: shard for unit in self._all_units() for key, shard in unit.updated.items()}

    @property
    def held(self) -> Held:
        weights = sum(unit.own.nbytes for unit in self._all_units())
        return Held(weights=weights, peak=max(self._peak, weights))

    def agree(self, micro_batches: int) -> int:
        """The most that any rank has: those with fewer turn to the same stages all the same."""
        most = torch.tensor([micro_batches])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return int(most.item())

    def begin(self, micro_batches: int) -> None:
        del micro_batches
        for unit in self._all_units():
            unit.gradient = None
            for shard in unit.updated.values():
                shard.grad = None
        self._had = dict.fromkeys(self._unit_of, False)
        self._peak = 0

    def expect(self, stages: Iterable[int]) -> None:
        self._coming = deque(stage for stage, _ in itertools.groupby(stages))

    def turn_to(self, stage: int, *, gradients: bool) -> None:
        """The next stage's weights travel while this one is used, and so does the sum of the last one's gradients."""
        if stage != self._stage:
            self._leave()
            for unit in self._units[stage]:
                unit.arrive()
            self._stage = stage
            if self._coming and self._coming[0] == stage:
                self._coming.popleft()
                self._fetch_next()
            self._note_peak()
        self._growing = self._growing or gradients

    def _fetch_next(self) -> None:
        if self._coming:
            for unit in self._units[self._coming[0]]:
                unit.fetch()

    def _leave(self) -> None:
        """Give the weights of the present stage back, and have its gradients summed."""
        if self._stage is None:
            return
        units, self._stage = self._units[self._stage], None
        growing, self._growing = self._growing, False
        if growing:
            self._note_peak(units)
            for unit in units:
                self._had.update({key: True for key, place in unit.places.items() if place.parameter.grad is not None})
        for unit in units:
            unit.free()
        if growing:
            self._collect()
            for unit in units:
                if unit.trained:
                    unit.reduce()

    def _collect(self) -> None:
        for unit in self._all_units():
            unit.collect()

    def release(self) -> None:
        self._leave()
        self._coming.clear()
        for unit in self._all_units():
            unit.drop()

    def _note_peak(self, growing: Sequence[_Unit] = ()) -> None:
        """Parts of everything, whole weights here or on their way, gradients that are whole or on theirs."""
        units = list(self._all_units())
        parts = sum(unit.own.nbytes + (0 if unit.gradient is None else unit.gradient.nbytes) for unit in units)
        whole = sum(unit.whole.untyped_storage().nbytes() + unit.passing_bytes for unit in units)
        self._peak = max(self._peak, parts + whole + sum(unit.bytes for unit in growing if unit.trained))

    def finish(self) -> None:
        """One small exchange tells which parameters got a gradient anywhere."""
        self.release()
        self._collect()
        had = torch.tensor([float(value) for value in self._had.values()])
        dist.all_reduce(had, dist.ReduceOp.MAX, group=self._group)
        used = dict(zip(self._had, had.bool().tolist(), strict=True))
        for unit in self._all_units():
            if unit.trained:
                unit.hand_out(used)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for unit in self._all_units():
            own = {key: parts[key] for key in unit.places if key in parts}
            if own:
                joined.update(unit.join(own))
        return {key: joined[key] for key in parts}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._unit_of[key].places[key].parameter.shape)

    def part(self, key: str, whole: Tensor) -> Tensor:
        return self._unit_of[key].part(key, whole)

    def close(self) -> None:
        """Nothing is hooked anywhere."""


def _make_units(
    stage: int, parameters: Mapping[str, Tensor], group: dist.ProcessGroup, alone: Collection[str]
) -> list[_Unit]:
    """In an order that is the same on every rank."""
    kinds: dict[object, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        key = f"{stage}/{name}"
        kind = key if key in alone else (parameter.dtype, parameter.requires_grad)
        assert isinstance(parameter, nn.Parameter), "programs hold parameters"
        kinds.setdefault(kind, {})[key] = parameter
    return [_Unit(kind, group) for kind in kinds.values()]
