"""Where the weights of one rank live and how the gradients of its group become sums: whole on every rank, or cut.

The executor says which stage it turns to; everything else happens at the start and at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch.distributed as dist
from torch import Tensor

from distensor.sync.gradients import GradientReducer

Stages: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""Parameters by stage, then by name."""


class Sync(StrEnum):
    """How the replicas of a job agree."""

    ALLREDUCE = "allreduce"
    ZERO3 = "zero3"
    DISTRO = "distro"
    DEMO = "demo"
    DILOCO = "diloco"
    SPARSELOCO = "sparseloco"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes of weights on one rank: what stays between steps, and the most that was there at any moment of a step.

    The peak counts weights and gradients, not activations and not what a collective needs while it runs.
    """

    weights: int
    peak: int


class WeightStore(Protocol):
    """The parameters of one rank, by "stage/name"."""

    @property
    def updated(self) -> Mapping[str, Tensor]:
        """What the optimizer updates: leaf tensors, after `finish` with the sums of the group in `.grad`."""
        ...

    @property
    def cut(self) -> bool:
        """Whether each rank of the group has other elements in `updated`, or all have the same."""
        ...

    @property
    def held(self) -> Held: ...

    def agree(self, micro_batches: int) -> int:
        """For how many micro-batches all ranks of the group turn to their stages, where this one has so many."""
        ...

    def begin(self, micro_batches: int) -> None:
        """A step starts in which each stage has so many backward passes on this rank."""
        ...

    def expect(self, stages: Iterable[int]) -> None:
        """The stages that a pass is going to turn to, in order: what comes next may be fetched ahead."""
        ...

    def turn_to(self, stage: int, *, gradients: bool) -> None:
        """The whole weights of `stage` are about to be used; `gradients` says that its gradients will grow."""
        ...

    def release(self) -> None:
        """No stage is used any longer. Every rank of the group calls it after its last stage of a pass."""
        ...

    def finish(self) -> None:
        """The step's last backward is over: leave the sums of the group in `updated`. None where nobody has any."""
        ...

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that go with `updated` (the weights, gradients, averages), in the parameters' own shapes.

        All ranks of the group call it with the same keys.
        """
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        ...

    def part(self, key: str, whole: Tensor) -> Tensor:
        """What this rank keeps of a tensor in the parameter's own shape."""
        ...

    def close(self) -> None: ...


def keyed(stages: Stages) -> dict[str, Tensor]:
    """By "stage/name", in the order of the stages."""
    return {f"{stage}/{name}": tensor for stage in sorted(stages) for name, tensor in stages[stage].items()}


class ReplicatedWeights:
    """Every rank of the group holds all weights of its stages; gradients are summed while backward runs."""

    cut = False

    def __init__(
        self,
        stages: Stages,
        group: dist.ProcessGroup | None,
        see: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.updated: Mapping[str, Tensor] = keyed(stages)
        trained = [parameter for parameter in self.updated.values() if parameter.requires_grad]
        self._reducer = GradientReducer(trained, group, see=see)

    @property
    def held(self) -> Held:
        weights = sum(parameter.nbytes for parameter in self.updated.values())
        return Held(weights=weights, peak=weights + sum(p.nbytes for p in self.updated.values() if p.requires_grad))

    def agree(self, micro_batches: int) -> int:
        return micro_batches

    def begin(self, micro_batches: int) -> None:
        for parameter in self.updated.values():
            parameter.grad = None
        self._reducer.begin(micro_batches)

    def expect(self, stages: Iterable[int]) -> None:
        """They are all here."""

    def turn_to(self, stage: int, *, gradients: bool) -> None:
        """They are all here."""

    def release(self) -> None:
        """They stay."""

    def finish(self) -> None:
        self._reducer.finish()

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parts)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.updated[key].shape)

    def part(self, key: str, whole: Tensor) -> Tensor:
        del key
        return whole

    def close(self) -> None:
        self._reducer.close()
