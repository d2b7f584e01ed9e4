"""What a declaration would do, computed without a worker: the result of `ds.plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distensor.core import Coordinates, ParallelConfig
from distensor.core.control import Mesh
from distensor.core.errors import UserError
from distensor.core.layouts import WeightLayout
from distensor.core.problems import Problems
from distensor.core.reading import Reading, Unavailable
from distensor.core.schedules import Schedule
from distensor.core.table import bytes_text, count_text, table
from distensor.training.plan_links import OverLinks


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """One rank of a replica; all replicas are alike.

    `forward_flops` and `activation_bytes` are of one micro-batch: the floating-point operations of matrix products,
    convolutions and attention, and the bytes that are kept for the backward pass, of the largest of its stages.
    `fixed_bytes` are weights, gradients and two states of an optimizer such as AdamW; with sync="zero3" a replica's
    part of all four, and weights and gradients of the largest stage.
    """

    rank: int
    place: Coordinates
    stages: tuple[int, ...]
    parameters: int
    fixed_bytes: int
    forward_flops: int
    activation_bytes: int
    in_flight: int
    """The most micro-batches whose activations it holds at once, counted per stage."""

    @property
    def memory_bytes(self) -> int:
        """About so much memory for weights, gradients, optimizer and activations; temporary values come on top."""
        return self.fixed_bytes + self.in_flight * self.activation_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `ds.plan` found out; `print` it.

    `rows` is the number of rows of the largest micro-batch. `bubble` is the part of a step in which a rank waits for
    its pipeline, all ranks together, when stages take as long as their operations and links take no time.
    """

    parallel: ParallelConfig
    schedule: Schedule
    micro_batches: int
    rows: int
    ranks: tuple[RankPlan, ...]
    bubble: float
    layouts: Mapping[str, WeightLayout]
    gathers: tuple[str, ...]
    """Operations that tensor or context parallelism has no rule for: they run whole on every rank of the axis."""
    mesh: Reading[Mesh]
    problems: tuple[UserError, ...]
    over_links: OverLinks | None = None
    """The same over links that jobs of this session have measured; None before that."""

    def check(self) -> None:
        """Raise what stands in the way: one problem as the error that it is, several as one error with all of them.

        Raises:
            UserError: there are problems.
        """
        problems = Problems()
        for problem in self.problems:
            problems.add(problem)
        problems.report()

    def __str__(self) -> str:
        parts = [
            f"{self.parallel.describe()} = {self.parallel.world_size} ranks, schedule {self.schedule.value}, at most "
            f"{self.micro_batches} micro-batches of at most {self.rows} rows for each of {self.parallel.data_parallel} "
            "replicas",
            table(_RANK_HEADERS, [_rank_row(rank) for rank in self.ranks]),
            f"pipeline bubble {self.bubble:.1%} of a step (links and unequal devices not counted)",
            *([] if self.over_links is None else [str(self.over_links)]),
            *_layout_lines(self.layouts),
            *(f"gathered: {gather}" for gather in self.gathers),
            self._mesh_line(),
            *(f"cannot run: {problem}" for problem in self.problems),
        ]
        return "\n".join(parts)

    def _mesh_line(self) -> str:
        if isinstance(self.mesh, Unavailable):
            return f"mesh: not compared ({self.mesh.reason})"
        free = self.mesh.free_bytes
        memory = free.reason if isinstance(free, Unavailable) else f"{bytes_text(free)} of free memory"
        needed = self.parallel.data_parallel * sum(rank.memory_bytes for rank in self.ranks)
        return (
            f"mesh: {self.mesh.available_workers} workers and {memory}; all ranks together take about "
            f"{bytes_text(needed)}"
        )


_RANK_HEADERS = (
    "rank",
    "place",
    "stages",
    "parameters",
    "weights+grads+optimizer",
    "FLOPs/micro-batch",
    "activations kept/micro-batch",
    "in flight",
    "memory about",
)


def _rank_row(rank: RankPlan) -> tuple[object, ...]:
    place = rank.place
    return (
        rank.rank,
        f"pp {place.pp} tp {place.tp} cp {place.cp}",
        ",".join(map(str, rank.stages)),
        count_text(rank.parameters),
        bytes_text(rank.fixed_bytes),
        count_text(rank.forward_flops),
        bytes_text(rank.activation_bytes),
        rank.in_flight,
        bytes_text(rank.memory_bytes),
    )


def _layout_lines(layouts: Mapping[str, WeightLayout]) -> list[str]:
    if not layouts:
        return []
    alike = Counter(
        (_general(name), "x".join(map(str, layout.shape)), layout.dim, _held(layout))
        for name, layout in layouts.items()
    )
    headers = ("cut weight", "shape", "dim", "of each tp rank", "weights")
    return [table(headers, [(*row, count) for row, count in alike.items()])]


def _general(name: str) -> str:
    """Layers of a list are alike: their index is left out."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _held(layout: WeightLayout) -> str:
    lengths = _lengths(layout)
    return str(lengths[0]) if _is_even(layout) else " + ".join(map(str, lengths))


def _is_even(layout: WeightLayout) -> bool:
    return len(set(_lengths(layout))) == 1


def _lengths(layout: WeightLayout) -> Sequence[int]:
    return [layout.local_shape(rank)[layout.dim] for rank in range(layout.ranks)]
