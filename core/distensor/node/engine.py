"""The shard executor and the sync engine of one rank: programs in, committed steps out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distensor.core import Axis, Clock, RankLayout
from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.core.schedules import (
    Action,
    Phase,
    rank_of_stage,
    splits_backward,
)
from distensor.node.faults import Cheat, FaultPhase, Loss
from distensor.node.groups import NO_GROUPS, MeshGroups, torch_groups
from distensor.node.held_state import HeldState
from distensor.node.link_probe import Neighbours
from distensor.node.norm_shares import counted_keys
from distensor.node.orders import AS_SCHEDULED, Pace, chosen
from distensor.node.pacing import measured_figures
from distensor.node.pipeline import PipelineExecutor, Totals
from distensor.node.plan_checks import actions_of, check_slices, check_stages, check_tied
from distensor.node.replicas import Replicas
from distensor.node.sketch import Cheating, LocalGradients, Sketch, Sketcher, clear_gradients, numbers_of
from distensor.node.step_report import Decided, Noticed, Prepared, StepReport, Update
from distensor.node.tied import sum_tied_gradients
from distensor.node.world_sums import WorldSums, sum_over_world
from distensor.optim.clipping import partial_norm
from distensor.optim.distro.exchange import Alone, Exchange, GroupExchange
from distensor.optim.updater import Updater
from distensor.program import Limits, StageProgram, StageRunner
from distensor.sync import ReplicatedWeights, ShardedWeights, Sync, WeightStore, keyed

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core.warm_up import RankFigures
    from distensor.node.aggregated import Aggregators
    from distensor.node.ipc import WorkerAssignment
    from distensor.node.orders import JobPlan, WitnessOrder
    from distensor.node.pacer import Pacer
    from distensor.transport import DataPlane


class ShardEngine(HeldState):
    """Holds the stages of one rank, their optimizer and the groups that they reduce over.

    Args:
        groups: of this rank; by default they are made over torch.distributed, by all ranks at the same time.
        pacer: says when to rest between micro-batches; by default never.
        reach: told of each phase of a step, with its number; a fault on purpose may come there.
        aggregators: of the epoch, where it has some.
        loss: what happens on purpose to updates that replicas exchange; by default all arrive.
        cheat: what this rank gives on purpose to the others instead of its gradients; by default those.
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
        reach: Callable[[FaultPhase, int], None] = lambda _phase, _step: None,
        aggregators: Aggregators | None = None,
        loss: Loss | None = None,
        cheat: Cheat | None = None,
    ) -> None:
        super().__init__()
        self._reach = reach
        self._loss = loss
        self._cheat = cheat
        self._device = device
        self._clock = clock
        self._pacer = pacer
        self._memory_limit = assignment.memory_limit
        self._loaded = False
        self._lr = 0.0
        self._last: int | None = None
        self.decided: Decided | None = None  # the newest step that this rank has committed
        self.prepared: Prepared | None = None  # one of which it has everything but the word of the others
        self._replicas = Replicas(clock)
        self._groups: MeshGroups = NO_GROUPS
        self._seat(assignment, plane, groups, aggregators)

    def load(self, plan: JobPlan, programs: Mapping[int, bytes], weights: dict[int, dict[str, Tensor]]) -> None:
        """Validate the programs and build this rank's stages; nothing of the previous ones stays.

        Each stage's tensors are taken out of `weights`: they need not be there twice.

        Raises:
            ProgramRejectedError: a program that is not allowed, or stages that are not this rank's.
        """
        check_stages(plan, programs, self._layout, self._rank)
        self._loaded, self._owed, self.decided, self.prepared, self.filling = False, None, None, None, None
        if self._store is not None:
            self._store.close()
        check_slices(plan)
        self._store = self._take_stages(plan, programs, weights)
        check_tied(plan, self._runners)
        self._plan = plan
        self._take_place(self._store)
        try:
            self._updater = Updater(plan.optimizer, self._store.updated, self._replicas)
        except ConfigError as error:
            raise ProgramRejectedError(str(error)) from error
        self._optimizer_bytes: int | None = None
        self._loaded = True

    def _take_place(self, store: WeightStore) -> None:
        """What depends on the other ranks."""
        plan = self._plan
        group = None if store.cut else self._summing(plan)
        self._counted = counted_keys(plan, store.updated, whole=self._place.tp == 0, group=group)
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
            reach=self._reach,
        )
        self._replicas.bind(self._exchange(plan))

    def rejoin(
        self,
        assignment: WorkerAssignment,
        plane: DataPlane,
        groups: MeshGroups | None = None,
        aggregators: Aggregators | None = None,
    ) -> None:
        """Take another rank's place in a later epoch, at the same place of tp, pp and cp, with all that is loaded here.
        Weights that are cut over the replicas (ZeRO-3) do not fit another membership: a load has to come first."""
        self._seat(assignment, plane, groups, aggregators)
        if self._loaded and self._store is not None and self._store.cut:
            self._loaded = False
        if self._loaded and self._store is not None:
            if self.filling is not None:
                self.settle()
                self.filling.give_up_orders()
            self._updater.part()  # before the way to the other replicas is another one
            self._store.close()
            self._store = self._replicated(self._plan)
            self._take_place(self._store)

    def _seat(
        self,
        assignment: WorkerAssignment,
        plane: DataPlane,
        groups: MeshGroups | None,
        aggregators: Aggregators | None,
    ) -> None:
        self._layout = RankLayout(assignment.parallel)
        self._rank = assignment.rank
        self._place = self._layout.coordinates(assignment.rank)
        self._plane, self._aggregators = plane, aggregators
        fresh = torch_groups(self._layout, assignment.rank, self._clock) if groups is None else groups
        self._groups = self._groups.going_on_as(fresh)

    @property
    def loaded(self) -> bool:
        """Whether programs and weights are here."""
        return self._loaded

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
        return cut or self._replicated(plan)

    def _replicated(self, plan: JobPlan) -> ReplicatedWeights:
        parameters = {stage: runner.parameters for stage, runner in self._runners.items()}
        names = {id(parameter): key for key, parameter in keyed(parameters).items()}
        cheating = None if self._cheat is None else Cheating(self._cheat, self._rank)
        self._sketcher = Sketcher(plan.seed)
        self._local = LocalGradients(self._sketcher, names, cheating)
        return ReplicatedWeights(parameters, self._summing(plan), self._local.see)

    def witness(self, order: WitnessOrder, sequence: int, number: int) -> Sketch | None:
        """What another replica should compute in step `number`, which is still to come: nothing here changes. None
        while weights are still to come.

        Raises:
            ProgramRejectedError: this rank alone cannot know it.
        """
        weights, sizes = self._settled, self._layout.config
        alone = (sizes.tensor_parallel, sizes.pipeline_parallel, sizes.context_parallel) == (1, 1, 1)
        if self.filling is not None:
            return None
        if not alone or weights.cut or self._plan.optimizer.sparse is not None:
            raise ProgramRejectedError(f"rank {self._rank} cannot recompute the unit of replica {order.replica} alone")
        batches, replica = order.batches, order.replica
        clear_gradients(weights.updated)
        actions = self._actions(len(batches))
        self._executor.run(sequence, actions, batches, training=True, step=number, replica=replica)
        found = numbers_of(self._sketcher.of_all(weights.updated.items()))
        clear_gradients(weights.updated)
        return found

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
        sketch: bool = False,
    ) -> StepReport:
        """Optimizer step `number` over this replica's micro-batches. All ranks apply the update, or none does. `last`
        is the number of the run's last step, where it is known.

        The update is owed from then on: `settle` carries it out, and so does whatever looks at the weights. Carried out
        here are the first, which needs memory, and those of replicas that exchange updates, which need the other ranks.
        """
        self._lr, self._last = lr, last
        report = self._gradients(sequence, batches, number, pace, holding=True, sketch=sketch)
        return self._decide(report, number)

    def _decide(self, report: StepReport, number: int) -> StepReport:
        if not (report.weight > 0 and math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            return report
        self._reach(FaultPhase.UPDATE, number)
        sparse = self._plan.optimizer.sparse
        exchange = sparse is None or sparse.exchanges(number, self._last)
        self._owed = update = Update(lr=self._lr, scale=report.scale, exchange=exchange)
        exchanging = -self._replicas.seconds
        if self._optimizer_bytes is None or sparse is not None:
            self.settle()
            self._optimizer_bytes = self._optimizer_bytes or self._updater.bytes
        noticed = report.noticed
        if noticed is not None and update.exchange:
            noticed = replace(noticed, exchanged=self._updater.exchanged or noticed.exchanged)
        # An exchange that is one step late happens while the step computes, and costs it nothing.
        late = sparse is not None and sparse.delay
        exchanging = 0.0 if late else exchanging + self._replicas.seconds
        report = replace(
            report,
            committed=True,
            optimizer_bytes=self._optimizer_bytes or 0,
            sync_seconds=report.sync_seconds + exchanging,
            noticed=noticed,
        )
        self.decided = Decided(number=number, report=report)
        return report

    def resolve(self, number: int, sums: WorldSums) -> StepReport:
        """Carry out a step that others have decided, from the sums that they know and the gradients that are here.

        Raises:
            ProgramRejectedError: the gradients of that step are not here.
        """
        ready, self.prepared = self.prepared, None
        if ready is None or ready.number != number:
            here = "none" if ready is None else f"step {ready.number}"
            raise ProgramRejectedError(f"rank {self._rank}: step {number} is to be resolved, and {here} is prepared")
        return self._decide(self._reported(ready, sums), number)

    def gradients(
        self, sequence: int, batches: Sequence[Mapping[str, Tensor]], wanted: Sequence[str], number: int = 0
    ) -> tuple[StepReport, dict[str, Tensor]]:
        """The mean gradients of the whole batch for the `wanted` parameters ("stage/name"), without an update.

        Dropout draws as in step `number`.

        Raises:
            ProgramRejectedError: a parameter that is not here or not trained.
        """
        trained = {key: p for key, p in self._settled.updated.items() if p.requires_grad}
        chosen(trained, wanted)
        with self._updater.at_common():
            report = self._gradients(sequence, batches, number)
        divisor = report.weight if report.weight > 0 else 1.0
        parts = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in trained.items()}
        if self._plan.optimizer.sparse is not None and self._groups.replicas is not None:
            for key in sorted(parts):
                self._groups.replicas.allreduce([parts[key]]).wait()
        whole = chosen(self._weights.whole(parts), wanted)
        return report, {key: gradient / divisor for key, gradient in whole.items()}

    def evaluate(self, sequence: int, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
        """(mean loss, weight) of the whole batch, without gradients and without dropout."""
        actions = self._actions(self._settled.agree(len(batches)))
        actions = tuple(action for action in actions if action.phase is Phase.FORWARD)
        with self._updater.at_common():
            totals = self._executor.run(sequence, actions, batches, training=False)
        sums = self._over_world(totals)
        return sums.loss, sums.weight

    def _actions(self, micro_batches: int, warm_up: Sequence[int] | None = None) -> tuple[Action, ...]:
        return actions_of(self._plan, self._layout, self._place.pp, micro_batches, warm_up)

    def _gradients(
        self,
        sequence: int,
        batches: Sequence[Mapping[str, Tensor]],
        number: int,
        pace: Pace = AS_SCHEDULED,
        *,
        holding: bool = False,
        sketch: bool = False,
    ) -> StepReport:
        """Sums of weight * gradient in `.grad`; nothing is committed yet. `holding`: others may decide. `sketch`: of
        what this rank itself computed."""
        in_axes = self._groups.axis_seconds
        self.prepared = None
        self._weights.begin(len(batches))
        if not self._weights.cut:
            self._local.begin(number, wanted=sketch)
        actions = self._actions(self._weights.agree(len(batches)), pace.warm_up)
        totals = self._executor.run(sequence, actions, batches, training=True, measure=pace.measure, step=number)
        in_axes = self._groups.axis_seconds - in_axes
        started = self._clock.monotonic()
        self._reach(FaultPhase.REDUCE, number)
        self._weights.finish()
        self._sum_tied(sequence)
        own_norm = partial_norm(self._counted_gradients(), self._plan.norm_type)
        ready = Prepared(number=number, totals=totals, in_axes=in_axes, started=started)
        # Whoever gets the sums knows that every rank came here: so a step that one has decided, all others can.
        self.prepared = ready if holding else None
        self._reach(FaultPhase.DECIDE, number)
        sums = self._over_world(totals, own_norm)
        self.prepared = None
        report = self._reported(ready, sums)
        return replace(report, figures=self._measure(sequence, totals, len(batches))) if pace.measure else report

    def _reported(self, ready: Prepared, sums: WorldSums) -> StepReport:
        return StepReport(
            loss=sums.loss,
            weight=sums.weight,
            grad_norm=sums.grad_norm,
            scale=sums.scale(self._plan.clip_norm),
            sums=sums,
            compute_seconds=max(0.0, ready.totals.compute_seconds - ready.in_axes),
            sync_seconds=self._clock.monotonic() - ready.started + ready.in_axes,
            wait_seconds=ready.totals.wait_seconds,
            committed=False,
            held=self._weights.held,
            optimizer_bytes=self._optimizer_bytes or 0,
            noticed=None if self._plan.optimizer.sparse is None else Noticed(dropped=sums.dropped),
            sketch=None if self._weights.cut else self._local.taken(),
        )

    def _measure(self, sequence: int, totals: Totals, micro_batches: int) -> RankFigures | None:
        """All ranks have just summed over the world: nothing else is on its way."""
        ranks, place = self._layout.config.pipeline_parallel, self._place.pp
        neighbours = Neighbours(
            before=self._rank_at(place - 1) if place > 0 else None,
            after=self._rank_at(place + 1) if place < ranks - 1 else None,
        )
        return measured_figures(
            totals,
            plane=self._plane,
            clock=self._clock,
            sequence=sequence,
            neighbours=neighbours,
            micro_batches=micro_batches,
            memory_limit=self._memory_limit,
            weight_bytes=sum(runner.program.weight_bytes for runner in self._runners.values()),
        )

    def _counted_gradients(self) -> Iterator[Tensor]:
        """The gradients whose norm this rank adds up."""
        for key, parameter in self._weights.updated.items():
            if parameter.grad is not None and key in self._counted:
                yield parameter.grad

    def _exchange(self, plan: JobPlan) -> Exchange:
        """The way to the other replicas, where updates travel instead of gradients."""
        group, sparse = self._groups.replicas, plan.optimizer.sparse
        if sparse is None or group is None:
            return Alone()
        me, loss = group.rank(), self._loss
        arrives = None if loss is None else lambda turn, sender: not loss.takes(turn, sender, me)
        peers = GroupExchange(group, torch.device("cpu"), arrives=arrives)
        if self._aggregators is None:
            return peers
        return self._aggregators.exchange(peers, sparse, list(map(int, self._layout.group_of(self._rank, Axis.DP))))

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
