"""The shard executor and the sync engine of one rank: programs in, committed steps out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distensor.core import Axis, Clock, RankLayout
from distensor.core.errors import ProgramRejectedError
from distensor.core.schedules import Phase, Schedule, actions_of_rank, check_pipeline_sizes
from distensor.node.pipeline import PipelineExecutor, Totals
from distensor.node.tied import sum_tied_gradients
from distensor.optim import OptimizerSpec, build_optimizer, set_learning_rate
from distensor.program import Limits, StageProgram, StageRunner

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.ipc import WorkerAssignment
    from distensor.sync import GradientReducer
    from distensor.transport import DataPlane


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What the driver's `load` command says besides programs and weights."""

    schedule: Schedule
    stages: int
    optimizer: OptimizerSpec
    clip_norm: float | None
    seed: int
    tied: tuple[TiedWeight, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedWeight:
    """One weight that several stages hold: (stage, its name in that stage), the first being the one that counts."""

    holders: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one rank can say of a step."""

    loss: float
    weight: float
    grad_norm: float
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    committed: bool


def parse_plan(meta: Mapping[str, Any]) -> JobPlan:
    """Raises ProgramRejectedError for what is not a plan."""
    try:
        clip = meta["clip_norm"]
        return JobPlan(
            schedule=Schedule(meta["schedule"]),
            stages=int(meta["stages"]),
            optimizer=OptimizerSpec.from_json(meta["optimizer"]),
            clip_norm=None if clip is None else float(clip),
            seed=int(meta["seed"]),
            tied=tuple(
                TiedWeight(holders=tuple((int(stage), str(name)) for stage, name in group)) for group in meta["tied"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProgramRejectedError(f"load command: {error!r} in {str(dict(meta))[:300]}") from error


class ShardEngine:
    """Holds the stages of one rank, their optimizer and the groups that they reduce over."""

    def __init__(self, *, assignment: WorkerAssignment, plane: DataPlane, device: torch.device, clock: Clock) -> None:
        self._layout = RankLayout(assignment.parallel)
        self._rank = assignment.rank
        self._place = self._layout.coordinates(assignment.rank)
        self._plane = plane
        self._device = device
        self._clock = clock
        self._memory_limit = assignment.memory_limit
        self._runners: dict[int, StageRunner] = {}
        self._loaded = False
        self._reducer: GradientReducer | None = None
        self._dp_group = self._make_dp_group()

    def _make_dp_group(self) -> dist.ProcessGroup | None:
        """Every rank takes part in making every group, in the same order."""
        if self._layout.config.data_parallel == 1:
            return None
        mine = None
        for ranks in self._layout.groups(Axis.DP):
            group = dist.new_group([int(rank) for rank in ranks], backend="distensor")
            if self._rank in ranks:
                mine = group
        return mine

    @property
    def own_stages(self) -> list[int]:
        return sorted(self._runners)

    def load(self, plan: JobPlan, programs: Mapping[int, bytes], weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Validate the programs and build this rank's stages; nothing of the previous ones stays.

        Raises:
            ProgramRejectedError: a program that is not allowed, or stages that are not this rank's.
        """
        ranks = self._layout.config.pipeline_parallel
        check_pipeline_sizes(ranks=ranks, stages=plan.stages)
        expected = list(range(self._place.pp, plan.stages, ranks))
        if sorted(programs) != expected:
            raise ProgramRejectedError(f"rank {self._rank} was given stages {sorted(programs)}, not {expected}")
        self._loaded = False
        if self._reducer is not None:
            self._reducer.close()
        limits = Limits() if self._memory_limit is None else Limits(max_bytes=self._memory_limit)
        self._runners = {
            stage: StageRunner(
                StageProgram.from_json(text, limits), weights.get(stage, {}), self._device, limits=limits
            )
            for stage, text in programs.items()
        }
        self._plan = plan
        self._executor = PipelineExecutor(
            plane=self._plane,
            rank=self._rank,
            runners=self._runners,
            rank_of_stage=[self._rank_of_stage(stage) for stage in range(plan.stages)],
            device=self._device,
            clock=self._clock,
            seed=plan.seed,
            replica=self._place.dp,
        )
        self._parameters = self._unique_parameters()
        self._optimizer = build_optimizer(plan.optimizer, self._parameters)
        self._reducer = self._make_reducer()
        self._loaded = True

    def require_load(self) -> None:
        """Raise ProgramRejectedError unless programs are loaded."""
        if not self._loaded:
            raise ProgramRejectedError(f"rank {self._rank} has no program: a load command must come first")

    def _rank_of_stage(self, stage: int) -> int:
        return self._layout.rank(
            dp=self._place.dp,
            tp=self._place.tp,
            cp=self._place.cp,
            pp=stage % self._layout.config.pipeline_parallel,
        )

    def _unique_parameters(self) -> list[Tensor]:
        """This rank's trainable parameters; a weight that two of its own stages share stays two tensors here."""
        return [
            parameter
            for stage in sorted(self._runners)
            for parameter in self._runners[stage].parameters.values()
            if parameter.requires_grad
        ]

    def _make_reducer(self) -> GradientReducer | None:
        if self._dp_group is None or not self._parameters:
            return None
        from distensor.sync import GradientReducer

        return GradientReducer(self._parameters, self._dp_group)

    def step(self, sequence: int, batches: Sequence[Mapping[str, Tensor]], lr: float) -> StepReport:
        """One optimizer step over this replica's micro-batches. The update is applied by all ranks or by none."""
        totals, loss, weight, norm, sync_seconds = self._gradients(sequence, batches)
        committed = weight > 0 and math.isfinite(loss) and math.isfinite(norm)
        if committed:
            self._apply(weight, norm, lr)
        return StepReport(
            loss=loss,
            weight=weight,
            grad_norm=norm,
            compute_seconds=totals.compute_seconds,
            sync_seconds=sync_seconds,
            wait_seconds=totals.wait_seconds,
            committed=committed,
        )

    def gradients(self, sequence: int, batches: Sequence[Mapping[str, Tensor]]) -> tuple[StepReport, dict[str, Tensor]]:
        """The mean gradients of the whole batch by "stage/name", without an update."""
        totals, loss, weight, norm, sync_seconds = self._gradients(sequence, batches)
        divisor = weight if weight > 0 else 1.0
        named = {
            f"{stage}/{name}": torch.zeros_like(p) if p.grad is None else p.grad / divisor
            for stage, runner in self._runners.items()
            for name, p in runner.parameters.items()
            if p.requires_grad
        }
        report = StepReport(
            loss=loss,
            weight=weight,
            grad_norm=norm,
            compute_seconds=totals.compute_seconds,
            sync_seconds=sync_seconds,
            wait_seconds=totals.wait_seconds,
            committed=False,
        )
        return report, named

    def evaluate(self, sequence: int, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """(mean loss, weight) of the whole batch, without gradients and without dropout."""
        actions = [action for action in self._actions(len(batches)) if action.phase is Phase.FORWARD]
        totals = self._executor.run(sequence, actions, batches, training=False)
        loss, weight, _ = self._sum_over_world(totals, 0.0)
        return loss, weight

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by "stage/name"."""
        return {
            f"{stage}/{name}": tensor.detach()
            for stage, runner in self._runners.items()
            for name, tensor in {**runner.parameters, **runner.buffers}.items()
        }

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers by "stage/name". Raises ProgramRejectedError for a name or shape of none."""
        own = self.state()
        for key, tensor in tensors.items():
            target = own.get(key)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise ProgramRejectedError(
                    f"replace {key!r} with {tuple(tensor.shape)} {tensor.dtype}: no such weight here"
                )
            target.copy_(tensor)

    def _actions(self, micro_batches: int) -> tuple[Any, ...]:
        return actions_of_rank(
            self._plan.schedule,
            rank=self._place.pp,
            ranks=self._layout.config.pipeline_parallel,
            stages=self._plan.stages,
            micro_batches=micro_batches,
        )

    def _gradients(
        self, sequence: int, batches: Sequence[Mapping[str, Tensor]]
    ) -> tuple[Totals, float, float, float, float]:
        """Sums of weight * gradient in `.grad`; returns totals, mean loss, weight, norm of the mean, sync seconds."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._reducer is not None:
            self._reducer.begin(len(batches))
        totals = self._executor.run(sequence, self._actions(len(batches)), batches, training=True)
        started = self._clock.monotonic()
        if self._reducer is not None:
            self._reducer.finish()
        self._sum_tied(sequence)
        loss, weight, squares = self._sum_over_world(totals, self._own_squares())
        norm = math.sqrt(squares) / weight if weight > 0 else math.nan
        return totals, loss, weight, norm, self._clock.monotonic() - started

    def _apply(self, weight: float, norm: float, lr: float) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        scale = 1.0 / weight
        limit = self._plan.clip_norm
        if limit is not None and norm > limit:
            scale *= limit / (norm + 1e-6)
        if gradients:
            torch._foreach_mul_(gradients, scale)
        set_learning_rate(self._optimizer, lr)
        if self._optimizer is not None:
            self._optimizer.step()

    def _own_squares(self) -> float:
        """Sum of squares of this rank's gradients, each weight of the model counted once in the whole mesh."""
        if self._place.dp != 0:
            return 0.0
        copies = {holder for tied in self._plan.tied for holder in tied.holders[1:]}
        total = 0.0
        for stage, runner in self._runners.items():
            for name, parameter in runner.parameters.items():
                if parameter.grad is not None and (stage, name) not in copies:
                    total += float(parameter.grad.double().square().sum())
        return total

    def _sum_over_world(self, totals: Totals, squares: float) -> tuple[float, float, float]:
        """(mean loss, weight, squares) over all ranks; the same on each, to the bit."""
        values = torch.tensor([totals.loss_times_weight, totals.weight, squares], dtype=torch.float64)
        if self._layout.config.world_size > 1:
            dist.all_reduce(values)
        loss_sum, weight, squares = values.tolist()
        return (loss_sum / weight if weight > 0 else math.nan), weight, squares

    def _sum_tied(self, sequence: int) -> None:
        for index, tied in enumerate(self._plan.tied):
            sum_tied_gradients(
                plane=self._plane,
                rank=self._rank,
                sequence=sequence,
                index=index,
                holders=[(stage, self._rank_of_stage(stage), name) for stage, name in tied.holders],
                runners=self._runners,
            )
