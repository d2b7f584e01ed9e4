"""The shard executor and the sync engine of one rank: programs in, committed steps out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distensor.core import Clock, RankLayout
from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.core.schedules import (
    Action,
    Phase,
    actions_of_rank,
    check_schedule,
    rank_of_stage,
    splits_backward,
    stages_of_rank,
)
from distensor.node.groups import MeshGroups, torch_groups
from distensor.node.link_probe import Neighbours, measure_links
from distensor.node.norm_shares import norm_share
from distensor.node.orders import AS_SCHEDULED, Pace
from distensor.node.pacing import rank_figures
from distensor.node.pipeline import PipelineExecutor, Totals
from distensor.node.step_report import Noticed, StepReport, Update
from distensor.node.tied import sum_tied_gradients
from distensor.node.world_sums import WorldSums, sum_over_world
from distensor.optim.clipping import partial_norm
from distensor.optim.distro.exchange import GroupExchange
from distensor.optim.sharing import part_state, whole_state
from distensor.optim.updater import Updater, name_of
from distensor.program import Limits, StageProgram, StageRunner
from distensor.sync import ReplicatedWeights, ShardedWeights, Sync, WeightStore, keyed

__all__ = ["ShardEngine", "StepReport"]

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core.warm_up import RankFigures
    from distensor.node.ipc import WorkerAssignment
    from distensor.node.orders import JobPlan
    from distensor.node.pacer import Pacer
    from distensor.optim.updater import State
    from distensor.transport import DataPlane


class ShardEngine:
    """Holds the stages of one rank, their optimizer and the groups that they reduce over.

    Args:
        groups: of this rank; by default they are made over torch.distributed, by all ranks at the same time.
        pacer: says when to rest between micro-batches; by default never.
    """

    def __init__(
        self,
        *,
        assignment: WorkerAssignment,
        plane: DataPlane,
        device: torch.device,
        clock: Clock,
        groups: MeshGroups | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self._layout = RankLayout(assignment.parallel)
        self._rank = assignment.rank
        self._place = self._layout.coordinates(assignment.rank)
        self._plane = plane
        self._device = device
        self._clock = clock
        self._pacer = pacer
        self._memory_limit = assignment.memory_limit
        self._runners: dict[int, StageRunner] = {}
        self._loaded = False
        self._store: WeightStore | None = None
        self._owed: Update | None = None
        self._groups = torch_groups(self._layout, assignment.rank, clock) if groups is None else groups

    @property
    def own_stages(self) -> list[int]:
        return sorted(self._runners)

    def load(self, plan: JobPlan, programs: Mapping[int, bytes], weights: dict[int, dict[str, Tensor]]) -> None:
        """Validate the programs and build this rank's stages; nothing of the previous ones stays.

        Each stage's tensors are taken out of `weights`: they need not be there twice.

        Raises:
            ProgramRejectedError: a program that is not allowed, or stages that are not this rank's.
        """
        self._check_stages(plan, programs)
        self._loaded, self._owed = False, None
        if self._store is not None:
            self._store.close()
        self._check_slices(plan)
        self._store = store = self._take_stages(plan, programs, weights)
        self._check_tied(plan)
        self._plan = plan
        self._counted = self._counted_keys(plan, store.updated)
        self._executor = PipelineExecutor(
            plane=self._plane,
            rank=self._rank,
            runners=self._runners,
            rank_of_stage=[self._rank_of_stage(stage) for stage in range(plan.stages)],
            device=self._device,
            clock=self._clock,
            seed=plan.seed,
            replica=self._place.dp,
            weights=store,
            pacer=self._pacer,
        )
        try:
            self._updater = Updater(plan.optimizer, store.updated, self._replicas(plan))
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error
        self._optimizer_bytes: int | None = None
        self._loaded = True

    def _check_stages(self, plan: JobPlan, programs: Mapping[int, bytes]) -> None:
        """Before anything is as long as the number of stages that somebody else wrote down."""
        ranks = self._layout.config.pipeline_parallel
        try:
            check_schedule(plan.schedule, ranks=ranks, stages=plan.stages)
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error
        count = plan.stages // ranks
        fits = len(programs) == count
        expected = stages_of_rank(plan.schedule, self._place.pp, ranks=ranks, stages=plan.stages) if fits else ()
        if sorted(programs) != list(expected):
            raise ProgramRejectedError(
                f"rank {self._rank} was given stages {sorted(programs)[:10]}; expected the {count} of {plan.stages} "
                f"that pipeline rank {self._place.pp} of {ranks} holds"
            )

    def _check_tied(self, plan: JobPlan) -> None:
        """A tied weight is held by stages that exist, and the copies that are here look alike."""
        for tied in plan.tied:
            kinds = set()
            for stage, name in tied.holders:
                runner = self._runners.get(stage)
                if not 0 <= stage < plan.stages or (runner is not None and name not in runner.parameters):
                    raise ProgramRejectedError(f"tied weight {name[:100]!r}: stage {stage} holds no such parameter")
                if runner is not None:
                    parameter = runner.parameters[name]
                    kinds.add((parameter.shape, parameter.dtype, parameter.requires_grad))
            if len(kinds) > 1:
                raise ProgramRejectedError(f"tied weight {tied.holders[:4]}: its copies differ in shape or dtype")

    def _check_slices(self, plan: JobPlan) -> None:
        """An optimizer that needs whole weights meets none that are cut."""
        try:
            if plan.sync is Sync.ZERO3:
                plan.optimizer.require_elementwise("sync='zero3'")
            if plan.sharded:
                plan.optimizer.require_elementwise("weights cut by tensor parallelism")
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error

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

    def require_load(self) -> None:
        """Raise ProgramRejectedError unless programs are loaded."""
        if not self._loaded:
            raise ProgramRejectedError(f"rank {self._rank} has no program: a load command must come first")

    def _rank_of_stage(self, stage: int) -> int:
        return self._rank_at(rank_of_stage(self._plan.schedule, stage, ranks=self._layout.config.pipeline_parallel))

    def _rank_at(self, place: int) -> int:
        """The rank at that place of this rank's own pipeline."""
        return self._layout.rank(dp=self._place.dp, tp=self._place.tp, cp=self._place.cp, pp=place)

    def _take_stages(
        self, plan: JobPlan, programs: Mapping[int, bytes], weights: dict[int, dict[str, Tensor]]
    ) -> WeightStore:
        """Where weights are cut, each stage is before the next one is built."""
        group, self._runners = self._summing(plan), {}
        tied = {f"{stage}/{name}" for weight in plan.tied for stage, name in weight.holders}
        cut = ShardedWeights({}, group, alone=tied) if plan.sync is Sync.ZERO3 and group is not None else None
        for stage in sorted(programs):
            runner = self._make_runner(plan, programs[stage], weights.pop(stage, {}))
            self._runners[stage] = runner
            if cut is not None:
                cut.add(stage, runner.parameters)
        return cut or ReplicatedWeights({stage: runner.parameters for stage, runner in self._runners.items()}, group)

    def _summing(self, plan: JobPlan) -> dist.ProcessGroup | None:
        """Over which ranks gradients are summed: not over replicas that keep their own and exchange updates."""
        return self._groups.gradients if plan.optimizer.sparse is None else self._groups.context

    def _make_runner(self, plan: JobPlan, text: bytes, weights: Mapping[str, Tensor]) -> StageRunner:
        limits = Limits() if self._memory_limit is None else Limits(max_bytes=self._memory_limit)
        return StageRunner(
            StageProgram.from_json(text, limits),
            weights,
            self._device,
            limits=limits,
            split_backward=splits_backward(plan.schedule),
            axes=self._groups.axes,
            recompute=plan.recompute,
        )

    def step(
        self,
        sequence: int,
        batches: Sequence[Mapping[str, Tensor]],
        lr: float,
        pace: Pace = AS_SCHEDULED,
        number: int = 0,
        last: int | None = None,
    ) -> StepReport:
        """Optimizer step `number` over this replica's micro-batches. All ranks apply the update, or none does. `last`
        is the number of the run's last step, where it is known.

        The update itself is owed from then on: `settle` carries it out, and so does whatever looks at the weights. Only
        the first one is carried out here, since it alone needs memory that may not be there, and those of replicas that
        exchange updates, since they need the other ranks.
        """
        report = self._gradients(sequence, batches, number, pace)
        if not (report.weight > 0 and math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            return report
        sparse = self._plan.optimizer.sparse
        exchange = sparse is None or sparse.exchanges(number, last)
        self._owed = update = Update(lr=lr, scale=report.scale, exchange=exchange)
        if self._optimizer_bytes is None or sparse is not None:
            self.settle()
            self._optimizer_bytes = self._optimizer_bytes or self._updater.bytes
        noticed = report.noticed
        if noticed is not None and update.exchange:
            noticed = replace(noticed, exchanged=self._updater.exchanged or noticed.exchanged)
        return replace(report, committed=True, optimizer_bytes=self._optimizer_bytes or 0, noticed=noticed)

    def settle(self) -> None:
        """Carry out the update that the last step decided on, unless that has been done."""
        owed, self._owed = self._owed, None
        if owed is not None:
            self._updater.step(owed.lr, owed.scale, exchange=owed.exchange)

    def exchange(self) -> None:
        """Replicas that take steps of their own exchange what came of them since the last time."""
        self.settle()
        self._updater.exchange()

    def gradients(
        self, sequence: int, batches: Sequence[Mapping[str, Tensor]], wanted: Sequence[str], number: int = 0
    ) -> tuple[StepReport, dict[str, Tensor]]:
        """The mean gradients of the whole batch for the `wanted` parameters ("stage/name"), without an update.

        Dropout draws as in step `number`.

        Raises:
            ProgramRejectedError: a parameter that is not here or not trained.
        """
        trained = {key: p for key, p in self._settled.updated.items() if p.requires_grad}
        _chosen(trained, wanted)
        with self._updater.at_common():
            report = self._gradients(sequence, batches, number)
        divisor = report.weight if report.weight > 0 else 1.0
        parts = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in trained.items()}
        if self._plan.optimizer.sparse is not None and self._groups.replicas is not None:
            for key in sorted(parts):
                self._groups.replicas.allreduce([parts[key]]).wait()
        whole = _chosen(self._weights.whole(parts), wanted)
        return report, {key: gradient / divisor for key, gradient in whole.items()}

    def evaluate(self, sequence: int, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """(mean loss, weight) of the whole batch, without gradients and without dropout."""
        actions = self._actions(self._settled.agree(len(batches)))
        actions = tuple(action for action in actions if action.phase is Phase.FORWARD)
        with self._updater.at_common():
            totals = self._executor.run(sequence, actions, batches, training=False)
        sums = self._over_world(totals)
        return sums.loss, sums.weight

    def state(self, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Parameters and buffers by "stage/name": the `wanted` ones, by default all; what all replicas have in common.

        Raises:
            ProgramRejectedError: one that is not here.
        """
        weights = self._settled
        whole = weights.whole({**weights.updated, **self._updater.common()})
        named = {key: tensor.detach() for key, tensor in (whole | self._buffers()).items()}
        return named if wanted is None else _chosen(named, wanted)

    def kept(self, wanted: Sequence[str]) -> tuple[dict[str, Tensor], State]:
        """What this rank itself keeps of the `wanted` weights, and of the optimizer's state of each: flat parts where
        the weights are cut. Of replicas that keep their own gradients, each but the first has only what is its own.

        Raises:
            ProgramRejectedError: a weight that is not here.
        """
        held = {**self._settled.updated, **self._updater.common(), **self._buffers()}
        chosen = _chosen({key: tensor.detach() for key, tensor in held.items()}, wanted)
        state = {key: fields for key, fields in self._updater.state().items() if key in chosen}
        sparse = self._plan.optimizer.sparse
        if sparse is None or self._place.dp == 0:
            return chosen, state
        own = {key: {name: fields[name] for name in fields.keys() & sparse.own_fields} for key, fields in state.items()}
        return {}, own

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite parameters and buffers by "stage/name". Raises ProgramRejectedError for a name or shape of none."""
        parameters = keyed({stage: runner.parameters for stage, runner in self._runners.items()})
        buffers = self._buffers()
        for key, tensor in tensors.items():
            target = (parameters | buffers).get(key)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise ProgramRejectedError(
                    f"replace {key!r} with {tuple(tensor.shape)} {tensor.dtype}: no such weight here"
                )
            if key in buffers:
                target.copy_(tensor)
            else:
                self._settled.updated[key].detach().copy_(self._weights.part(key, tensor))
        self._updater.refresh(tensors.keys())

    def _buffers(self) -> dict[str, Tensor]:
        return keyed({stage: runner.buffers for stage, runner in self._runners.items()})

    def averages(self, wanted: Sequence[str]) -> dict[str, Tensor]:
        """The moving average of the `wanted` trainable parameters by "stage/name".

        Raises:
            ProgramRejectedError: one that is not here, or no average is kept.
        """
        weights = self._settled  # first: it settles, and the averages follow the weights
        return _chosen(weights.whole(self._updater.averages()), wanted)

    @property
    def trained_elements(self) -> int:
        """Of the whole parameters that this rank has gradients of."""
        parameters = keyed({stage: runner.parameters for stage, runner in self._runners.items()})
        return sum(math.prod(self._weights.shape(key)) for key, p in parameters.items() if p.requires_grad)

    @property
    def trained(self) -> list[str]:
        """The parameters that have an optimizer's state, by "stage/name"."""
        return [key for key, parameter in self._weights.updated.items() if parameter.requires_grad]

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

    def _actions(self, micro_batches: int, warm_up: Sequence[int] | None = None) -> tuple[Action, ...]:
        try:
            return actions_of_rank(
                self._plan.schedule,
                rank=self._place.pp,
                ranks=self._layout.config.pipeline_parallel,
                stages=self._plan.stages,
                micro_batches=micro_batches,
                warm_up=warm_up,
            )
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error

    def _gradients(
        self, sequence: int, batches: Sequence[Mapping[str, Tensor]], number: int, pace: Pace = AS_SCHEDULED
    ) -> StepReport:
        """Sums of weight * gradient in `.grad`; nothing is committed yet."""
        in_axes = self._groups.axis_seconds
        self._weights.begin(len(batches))
        actions = self._actions(self._weights.agree(len(batches)), pace.warm_up)
        totals = self._executor.run(sequence, actions, batches, training=True, measure=pace.measure, step=number)
        in_axes = self._groups.axis_seconds - in_axes
        started = self._clock.monotonic()
        self._weights.finish()
        self._sum_tied(sequence)
        own_norm = partial_norm(self._counted_gradients(), self._plan.norm_type)
        sums = self._over_world(totals, own_norm)
        return StepReport(
            loss=sums.loss,
            weight=sums.weight,
            grad_norm=sums.grad_norm,
            scale=sums.scale(self._plan.clip_norm),
            compute_seconds=max(0.0, totals.compute_seconds - in_axes),
            sync_seconds=self._clock.monotonic() - started + in_axes,
            wait_seconds=totals.wait_seconds,
            committed=False,
            held=self._weights.held,
            optimizer_bytes=self._optimizer_bytes or 0,
            figures=self._measure(sequence, totals, len(batches)) if pace.measure else None,
            noticed=None if self._plan.optimizer.sparse is None else Noticed(dropped=sums.dropped),
        )

    def _measure(self, sequence: int, totals: Totals, micro_batches: int) -> RankFigures | None:
        """All ranks have just summed over the world: nothing else is on its way."""
        ranks, place = self._layout.config.pipeline_parallel, self._place.pp
        neighbours = Neighbours(
            before=self._rank_at(place - 1) if place > 0 else None,
            after=self._rank_at(place + 1) if place < ranks - 1 else None,
        )
        links = measure_links(
            plane=self._plane,
            neighbours=neighbours,
            sizes=totals.message_bytes,
            sequence=sequence,
            clock=self._clock,
        )
        return rank_figures(
            totals,
            micro_batches=micro_batches,
            links=links,
            neighbours=neighbours,
            memory_limit=self._memory_limit,
            weight_bytes=sum(runner.program.weight_bytes for runner in self._runners.values()),
        )

    def _counted_gradients(self) -> Iterator[Tensor]:
        """The gradients whose norm this rank adds up."""
        for key, parameter in self._weights.updated.items():
            if parameter.grad is not None and key in self._counted:
                yield parameter.grad

    def _counted_keys(self, plan: JobPlan, updated: Mapping[str, Tensor]) -> frozenset[str]:
        """Each element of the model is counted once in the whole mesh.

        After the sum, all ranks of dp and cp hold the same and share the work, or each holds its part. On tp a weight
        is either cut, and each rank has its part, or the same everywhere. Of a tied weight the first holder counts.
        """
        copies = {f"{stage}/{name}" for tied in plan.tied for stage, name in tied.holders[1:]}
        whole = self._place.tp == 0
        counted = {
            key: parameter.numel()
            for key, parameter in updated.items()
            if parameter.requires_grad and key not in copies and (whole or name_of(key) in plan.sharded)
        }
        group = self._summing(plan)
        if group is None or self._weights.cut:
            return frozenset(counted)
        return norm_share(counted, member=group.rank(), members=group.size())

    def _replicas(self, plan: JobPlan) -> GroupExchange | None:
        """The way to the other replicas, where updates travel instead of gradients."""
        group = self._groups.replicas
        return None if plan.optimizer.sparse is None or group is None else GroupExchange(group, torch.device("cpu"))

    def _over_world(self, totals: Totals, own_norm: float = 0.0) -> WorldSums:
        """The sums of all ranks; the same on each, to the bit.

        `own_norm` is this rank's part of the norm. Ranks without gradients take part like all others. The ranks of tp
        and cp all know the loss of their replica; one of them counts.
        """
        apart = self._plan.optimizer.sparse is not None
        return sum_over_world(
            self._groups.world,
            (totals.loss_times_weight, totals.weight) if (self._place.tp, self._place.cp) == (0, 0) else (0.0, 0.0),
            own_norm,
            kind=self._plan.norm_type,
            place=self._place.dp if apart else 0,
            places=self._layout.config.data_parallel if apart else 1,
        )

    def _sum_tied(self, sequence: int) -> None:
        for index, tied in enumerate(self._plan.tied):
            sum_tied_gradients(
                plane=self._plane,
                rank=self._rank,
                sequence=sequence,
                index=index,
                holders=[(stage, self._rank_of_stage(stage), name) for stage, name in tied.holders],
                weights=self._weights.updated,
            )


def _chosen(named: Mapping[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
    unknown = [name for name in wanted if name not in named]
    if unknown:
        raise ProgramRejectedError(f"asked for {unknown[0][:100]!r}, which this rank does not hold")
    return {name: named[name] for name in wanted}
