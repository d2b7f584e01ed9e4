"""What each rank of the mesh runs and holds, and how what the ranks send back becomes the whole model again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from distensor.core import Axis, Coordinates, ParallelConfig, RankLayout
from distensor.core.schedules import Schedule, stages_of_rank
from distensor.nn import Shard
from distensor.program import Source, cut, partition
from distensor.program.calls import TORCH_DTYPES
from distensor.program.values import weight_bytes
from distensor.sync import Sync
from distensor.training.replies import check_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core.layouts import WeightLayout
    from distensor.nn import DistributedModel
    from distensor.program import Captured, Cut, Partition, StageProgram
    from distensor.program.values import WeightSpec
    from distensor.training.options import TrainerOptions
    from distensor.training.replies import Layout, Reply

TiedHolders: TypeAlias = Sequence[tuple[int, str]]
"""(stage, name in that stage) of one tied weight, the first being the one that counts."""

COPIES: Mapping[Sync, int] = {Sync.DILOCO: 6, Sync.SPARSELOCO: 6}
"""Tensors of a weight's size that a rank keeps, where not four: an anchor too, and its momentum or a residual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPieces:
    """A captured module, cut for every place of the mesh. Use `MeshPieces.of`.

    `cuts` has the stages for each (tp, cp); replicas run the same. `layouts` are the weights that are cut on tp.
    """

    parallel: ParallelConfig
    schedule: Schedule
    cuts: Mapping[tuple[int, int], Cut]
    layouts: Mapping[str, WeightLayout]
    gathers: tuple[str, ...] = ()
    """What is made whole on every rank of an axis for want of a rule, in words."""
    sync: Sync = Sync.ALLREDUCE

    @classmethod
    def of(cls, captured: Captured, model: DistributedModel, options: TrainerOptions) -> MeshPieces:
        """Partition along tp and cp, then cut into stages.

        Raises:
            ShardingError, StageMappingError, CaptureError, BatchError, ConfigError: the model cannot be cut like this.
        """
        parallel = options.parallel
        parts = partition(
            captured,
            _dims(model),
            tensor=parallel.tensor_parallel,
            context=parallel.context_parallel,
            attention=options.context_attention,
            shares=options.context_shares,
        )
        cuts = {place: cut(graph, model.stages) for place, graph in parts.graphs.items()}
        return cls(
            parallel=parallel,
            schedule=options.schedule,
            cuts=cuts,
            layouts=parts.layouts,
            gathers=_gathers(parts),
            sync=options.sync,
        )

    @property
    def first(self) -> Cut:
        """The cut at tp 0, cp 0; batches are the same everywhere."""
        return self.cuts[0, 0]

    @property
    def stages(self) -> int:
        return len(self.first.programs)

    @property
    def tied(self) -> list[TiedHolders]:
        return [[(stage, group.name) for stage in group.stages] for group in self.first.tied]

    @property
    def sharded(self) -> list[str]:
        return sorted(self.layouts)

    def place(self, rank: int) -> Coordinates:
        return RankLayout(self.parallel).coordinates(rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        ranks = self.parallel.pipeline_parallel
        return stages_of_rank(self.schedule, self.place(rank).pp, ranks=ranks, stages=self.stages)

    def programs_of(self, rank: int) -> dict[int, StageProgram]:
        programs = self._cut_of(rank).programs
        return {stage: programs[stage] for stage in self.stages_of(rank)}

    def weights_of(self, rank: int) -> dict[int, dict[str, Tensor]]:
        """By stage: parameters, buffers and constants as the module holds them now, of cut ones the rank's part.

        Raises:
            CaptureError: one of them changed its dtype or shape since capture.
        """
        pieces = self._cut_of(rank)
        return {stage: pieces.weights(stage) for stage in self.stages_of(rank)}

    def inputs_of(self, rank: int) -> list[str]:
        """The tensors of a batch that this rank's stages read."""
        programs = self.programs_of(rank).values()
        return sorted({spec.name for program in programs for spec in program.inputs_from(Source.BATCH)})

    def bytes_per_rank(self) -> tuple[int, ...]:
        """Weights, gradients and two optimizer states (four, where replicas take steps of their own); activations come
        on top and are not predicted here.

        Where they are cut, each rank has its part of all four, and the weights and gradients of the largest stage, of
        another one on its way; but no less than its stages whole, as they are when they are loaded.
        """
        return tuple(self._bytes_of(rank) for rank in range(self.parallel.world_size))

    def _bytes_of(self, rank: int) -> int:
        stages = [program.weight_bytes for program in self.programs_of(rank).values()]
        if self.sync is not Sync.ZERO3:
            return COPIES.get(self.sync, 4) * sum(stages)
        ranks = self.parallel.data_parallel * self.parallel.context_parallel
        at_hand = 2 * sum(sorted(stages)[-2:])
        return max(-(-4 * sum(stages) // ranks) + at_hand, sum(stages))

    def trained_elements(self) -> tuple[int, ...]:
        """How many elements of trainable weights each rank has a gradient of."""
        return tuple(
            sum(
                math.prod(spec.shape)
                for program in self.programs_of(rank).values()
                for spec in program.parameters
                if spec.requires_grad
            )
            for rank in range(self.parallel.world_size)
        )

    def largest_tensor(self) -> int:
        """Bytes of the largest weight that a rank may send."""
        specs = [spec for pieces in self.cuts.values() for p in pieces.programs for spec in (*p.parameters, *p.buffers)]
        return max((weight_bytes(spec) for spec in specs), default=0)

    def drawing_modules(self) -> tuple[str, ...]:
        """Modules whose training forward draws random numbers, dropout above all."""
        nodes = [node for program in self.first.programs for node in program.nodes if node.site is not None]
        drawing = [node.module for node in nodes if node.args.get("p", node.args.get("dropout_p", 1)) != 0]
        return tuple(dict.fromkeys(drawing))

    def replies(self, *, gradients: bool, replica: int = 0) -> dict[int, Layout]:
        """What each rank has to send so that every weight (or gradient) comes once: by rank, "stage/name" -> kind.

        Only one replica and the first place of cp send. Of a cut weight every rank of tp sends its part, of
        another one the first; of a tied weight the first holder.
        """
        copies = {holder for holders in self.tied for holder in holders[1:]}
        found: dict[int, Layout] = {}
        for rank in range(self.parallel.world_size):
            place = self.place(rank)
            if (place.dp, place.cp) == (replica, 0):
                found[rank] = {
                    f"{stage}/{spec.name}": (TORCH_DTYPES[spec.dtype], spec.shape)
                    for stage, program in self.programs_of(rank).items()
                    for spec in _sent(program, gradients=gradients)
                    if (place.tp == 0 or spec.name in self.layouts) and (stage, spec.name) not in copies
                }
        return found

    def holders_of(self, rank: int) -> list[int]:
        """The ranks that together keep what `rank` runs with: it alone, or under ZeRO-3 its whole group, in order."""
        if self.sync is not Sync.ZERO3:
            return [rank]
        return [int(member) for member in RankLayout(self.parallel).group_of(rank, Axis.DP, Axis.CP)]

    def merge(self, replies: Sequence[Reply], expected: Mapping[int, Layout]) -> dict[str, Tensor]:
        """The whole tensors by their names in the module; of a buffer in several stages, the first stage's.

        Raises:
            WorkerFailedError: a rank sent something else than `expected` of it.
        """
        parts: dict[str, dict[int, Tensor]] = {}
        for reply in replies:
            check_tensors(reply, expected.get(reply.rank, {}))
            tp = self.place(reply.rank).tp
            for key, tensor in reply.tensors.items():
                parts.setdefault(key.partition("/")[2], {}).setdefault(tp, tensor.detach())
        return {name: self._whole(name, by_rank) for name, by_rank in parts.items()}

    def _whole(self, name: str, by_rank: Mapping[int, Tensor]) -> Tensor:
        layout = self.layouts.get(name)
        return by_rank[0] if layout is None else layout.join([by_rank[rank] for rank in range(layout.ranks)])

    def _cut_of(self, rank: int) -> Cut:
        place = self.place(rank)
        return self.cuts[place.tp, place.cp]


def _sent(program: StageProgram, *, gradients: bool) -> tuple[WeightSpec, ...]:
    if gradients:
        return tuple(spec for spec in program.parameters if spec.requires_grad)
    return (*program.parameters, *program.buffers)


def _gathers(parts: Partition) -> tuple[str, ...]:
    cut = [f"{found.op} in {found.module!r} (tp; from {', '.join(found.weights)})" for found in parts.gathers]
    return (*cut, *(f"{op} in {module!r} (cp; the whole sequence)" for op, module in parts.whole_sequences))


def _dims(model: DistributedModel) -> dict[str, int | None]:
    """The dim along which tp_spec cuts each parameter that it names, counted from the front."""
    shapes = {name: value.dim() for name, value in model.module.named_parameters()}
    return {
        name: placement.dim % shapes[name] if isinstance(placement, Shard) else None
        for name, placement in model.placements.items()
    }
