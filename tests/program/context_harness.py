"""Runs the ranks of the context-parallel axis as threads and compares with the eager module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from program_harness import Result, eager, gradient_differences, loss_difference, run_cut
from torch import Tensor, nn

from distensor.core.parallel import Axis
from distensor.nn import DistributedModel, StageMapping
from distensor.program import Captured, Cut, StageProgram, StageRunner, cut
from distensor.program.axes import AxisGroup
from distensor.program.partitioning import Partition
from distensor.testing.axes import Grid


class Ranks:
    """The stages of every rank of a partition, each as a worker gets it: through its bytes."""

    def __init__(
        self, module: nn.Module, made: Partition, stages: Sequence[Sequence[str]] | None = None, parts: int = 1
    ) -> None:
        self.module = module
        self.made = made
        self._parts = parts
        mapping = DistributedModel(module, stage_mapping=StageMapping(stages)).stages if stages else None
        self.pieces: dict[tuple[int, int], Cut] = {key: cut(graph, mapping) for key, graph in made.graphs.items()}
        self.programs = {
            key: [StageProgram.from_json(program.to_json()) for program in pieces.programs]
            for key, pieces in self.pieces.items()
        }
        self.grid = self._grid()

    def _grid(self) -> Grid:
        return Grid({Axis.TP: self.made.tensor, Axis.CP: self.made.context})

    def run(self, batch: Any, *, seed: int = 0) -> list[Result]:
        """Loss and gradients of each rank, tp fastest."""
        self.grid = self._grid()

        def rank(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> Result:
            key = place[Axis.TP], place[Axis.CP]
            pieces = self.pieces[key]
            runners = [
                StageRunner(program, pieces.weights(program.stage), axes=groups) for program in self.programs[key]
            ]
            return run_cut(pieces, runners, batch, self._parts, seed=seed)

        return self.grid.run(rank)

    def whole(self, batch: Any, *, seed: int = 0) -> Result:
        """The loss, the same on all ranks, and the full gradients: summed over cp, joined over tp."""
        found = self.run(batch, seed=seed)
        assert len({result.loss for result in found}) == 1
        summed = [self._summed(found[tp :: self.made.tensor]) for tp in range(self.made.tensor)]
        return Result(loss=found[0].loss, gradients={name: self._joined(name, summed) for name in summed[0]})

    def _summed(self, results: Sequence[Result]) -> dict[str, Tensor]:
        names = results[0].gradients
        return {name: sum((result.gradients[name] for result in results[1:]), names[name]) for name in names}

    def _joined(self, name: str, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
        layout = self.made.layouts.get(name)
        return parts[0][name] if layout is None else layout.join([part[name] for part in parts])


def differences(ranks: Ranks, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> tuple[float, float]:
    """The largest relative differences of the loss and of any gradient from the eager module."""
    reference = eager(ranks.module, batch, loss)
    ours = ranks.whole(batch)
    return loss_difference(ours, reference), max(gradient_differences(ours, reference).values())


def split_values(graph: Captured, full: Captured) -> int:
    """How many results of the graph are smaller than in the full one."""
    return sum(info.shape != full.values[name].shape for name, info in graph.values.items() if name in full.values)
