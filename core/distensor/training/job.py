"""One placed job of a trainer: captured, cut, shipped, and driven step by step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from distensor.core import DRIVER_RANK, Clock, ParallelConfig, Rank, RankLayout
from distensor.core.control import JobState, MeshMeasures, Topology, Unit, UnitKey
from distensor.core.errors import StateLostError, WorkerLostError
from distensor.optim import OptimizerSpec
from distensor.sync import Sync
from distensor.training.admission import admit, cut_for
from distensor.training.job_snapshot import JobSnapshot
from distensor.training.measures import mesh_measures
from distensor.training.members import Membership
from distensor.training.notes import NoteSender, Standpoint
from distensor.training.pacing import PipelinePacer
from distensor.training.ranks import JobRanks, named_tensors
from distensor.training.receipts import ReceiptSender
from distensor.training.replicas import ReplicaWatch
from distensor.training.replies import (
    LinkBytes,
    Reply,
    agreed,
    read_step,
)
from distensor.training.results import StepResult
from distensor.training.spot_checking import SpotChecks
from distensor.training.spot_checks import TOLERANCES
from distensor.training.step_results import Attempt, progress_of, slowest_of, step_result
from distensor.transport.driver import Command

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.program.losses import LossWeight
    from distensor.training.checkpoint_folder import Saved
    from distensor.training.connection import JobConnection
    from distensor.training.options import TrainerOptions
    from distensor.training.pieces import MeshPieces
    from distensor.training.sessions import Session
    from distensor.training.taking_over import TakenOver

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECEIPT_SECONDS = 10.0


class TrainingJob:
    """Use `TrainingJob.start`. Not safe to use from several threads."""

    def __init__(
        self,
        *,
        connection: JobConnection,
        model: DistributedModel,
        pieces: MeshPieces,
        options: TrainerOptions,
        receipts: ReceiptSender,
        clock: Clock,
        note_measures: Callable[[MeshMeasures], None],
        note_links: Callable[[Topology, Mapping[int, Sequence[LinkBytes]]], None] | None = None,
        optimizer: OptimizerSpec | None = None,
        restorable: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizer = optimizer
        self._connection = connection
        self._model = model
        self._ranks = JobRanks(connection=connection, model=model, pieces=pieces, options=options)
        self._options = options
        self._receipts = receipts
        self.checks = SpotChecks(
            options.spot_checks,
            TOLERANCES[options.precision.value],
            receipts.object_to,
            alike=not pieces.drawing_modules(),
        )
        self._clock = clock
        self._note_measures = note_measures
        self._note_links = note_links
        self._notes = NoteSender()
        self._told_rounds = 0
        self._apart = False
        self._trained = False
        self._take_mesh(options.parallel)
        self._tokens_per_second: float | None = None
        self._micro_batches_done = 0
        self._rank_links: dict[int, tuple[LinkBytes, ...]] = {}
        self._earlier_links: Counter[tuple[int, int]] = Counter()
        self._members: Membership | None = None
        if options.elastic:
            connection.exit_reason_seconds = 0.0
            self._members = Membership(
                connection,
                replicas=options.parallel.data_parallel,
                clock=clock,
                bytes_per_rank=lambda parallel: replace(pieces, parallel=parallel).bytes_per_rank(),
                apart=optimizer is not None and optimizer.sparse is not None,
                cut=options.sync is Sync.ZERO3,
                restorable=restorable,
                on_change=self._take_mesh,
                on_idle=self._rest,
            )

    @classmethod
    def start(
        cls,
        *,
        session: Session,
        name: str,
        model: DistributedModel,
        options: TrainerOptions,
        optimizer: OptimizerSpec,
        loss: Callable[[Any, Any], Tensor] | None,
        loss_weight: LossWeight,
        example: Any,
        restored: Saved | None = None,
        restorable: Callable[[], bool] = lambda: False,
    ) -> TrainingJob:
        """Capture and cut the model, place the job, ship the stages, and the optimizer state of `restored`.

        `restorable` says whether the caller can bring back the state of ranks that are lost.

        Raises:
            UserError: the model cannot be cut, or the mesh cannot carry it; no worker has been asked.
            PlacementError, WorkerLostError, ProgramRejectedError: as `JobConnection` does.
        """
        pieces = admit(session.query_mesh(), model, options, example, loss, loss_weight)
        connection = session.open_job(
            name=name,
            parallel=options.parallel,
            bytes_per_rank=pieces.bytes_per_rank(),
            largest_tensor=pieces.largest_tensor(),
            aggregators=() if optimizer.sparse is None else optimizer.sparse.aggregator_nodes,
            micro_batches=options.micro_batches * options.accumulate,
            wait=options.wait,
            priority=options.priority,
        )
        job = cls(
            connection=connection,
            model=model,
            pieces=pieces,
            options=options,
            receipts=ReceiptSender(session.client, session.clock),
            clock=session.clock,
            optimizer=optimizer,
            note_measures=session.note_measures,
            note_links=session.note_links,
            restorable=restorable,
        )
        try:
            job._ranks.ship(optimizer)
            if restored is not None:
                job.restore(restored)
        except BaseException as error:  # whatever it was, an interrupt included, the workers must be given back
            job.end(JobState.FAILED, f"{type(error).__name__}: {error}")
            raise
        return job

    @classmethod
    def take_over(
        cls,
        taken: TakenOver,
        *,
        session: Session,
        model: DistributedModel,
        options: TrainerOptions,
        optimizer: OptimizerSpec,
        loss: Callable[[Any, Any], Tensor] | None,
        loss_weight: LossWeight,
        example: Any,
        restorable: Callable[[], bool] = lambda: False,
    ) -> TrainingJob:
        """Go on with the ranks of a job whose trainer has ended.

        Raises:
            ConfigError: they hold another model, or were told other settings. Nothing has changed.
            UserError: the model cannot be cut.
        """
        job = cls(
            connection=taken.connection,
            model=model,
            pieces=cut_for(model, options, example, loss, loss_weight),
            options=options,
            receipts=ReceiptSender(session.client, session.clock),
            clock=session.clock,
            optimizer=optimizer,
            note_measures=session.note_measures,
            note_links=session.note_links,
            restorable=restorable,
        )
        job._take_mesh(taken.connection.topology.parallel)
        job._ranks.check_same(optimizer, taken.load, taken.programs)
        job._trained = taken.step > 0
        job._receipts.add(taken.unpaid)
        return job

    def _take_mesh(self, parallel: ParallelConfig) -> None:
        """What follows from who the ranks are."""
        self._ranks.take_mesh(parallel)
        self._replicas = ReplicaWatch(RankLayout(parallel), self._ranks.pieces.trained_elements())
        self._pacer = PipelinePacer(parallel=parallel, schedule=self._options.schedule, stages=self._options.stages)

    def _rest(self, idle: frozenset[int]) -> None:
        self._ranks.idle = idle

    def _complete(self) -> None:
        """Wait until all ranks hold all that they should."""
        if self._members is not None:
            self._with_members(self._members.complete)

    @property
    def replicas(self) -> int:
        """How many train now; others may be among the ranks to which weights are still to come."""
        return self._ranks.pieces.parallel.data_parallel - len(self._ranks.idle)

    @property
    def topology(self) -> Topology:
        return self._connection.topology

    @property
    def restarts(self) -> int:
        return self._connection.restarts

    @property
    def units_done(self) -> int:
        """Micro-batches that committed steps have taken through the ranks of this job, all ranks together."""
        return self._micro_batches_done

    def bytes_per_link(self) -> dict[tuple[int, int], int]:
        """Bytes sent from one place to another, (from, to); -1 is this trainer. Counted on the sockets by the sender.

        The figures of the ranks are those of the end of the newest step. Where members have changed, the number of a
        rank may have been that of several processes, one after the other.
        """
        return dict(self._earlier_links + self._present_links())

    def _present_links(self) -> Counter[tuple[int, int]]:
        sent = Counter({(int(DRIVER_RANK), rank): link.bytes_sent for rank, link in self._connection.stats().items()})
        for rank, links in self._rank_links.items():
            sent.update({(rank, link.peer): link.sent for link in links})
        return sent

    def step(
        self,
        number: int,
        batches: Sequence[Any],
        lr: float,
        total_steps: int | None,
        standpoint: Standpoint | None = None,
    ) -> tuple[StepResult, bool]:
        """One optimizer step over all `batches`. `standpoint`: what a trainer that takes this job over has to know.

        The second value says whether the ranks have applied the update: all have, or none.

        Raises:
            WorkerFailedError: an answer that is none, or ranks that do not agree.
            WorkerLostError: a rank was lost, and the job cannot go on without it.
            StateLostError: the job goes on, but what the ranks held is gone.
        """
        before, started = self._connection.bytes_moved(), self._clock.monotonic()
        while True:
            if self._members is not None:
                self._with_members(self._members.tend)
            parts, replica_of = self._ranks.split(batches), self._ranks.replica_of
            attempt = Attempt(
                parts=parts,
                epoch=self._connection.epoch,
                replica_of=replica_of,
                total_steps=total_steps,
                check=self.checks.choose([rank for rank, replica in replica_of.items() if parts[replica]]),
            )
            try:
                replies = self._run_step(number, attempt, lr, standpoint)
            except WorkerLostError as error:
                attempt = replace(attempt, check=None)  # of what is answered now no witness knows
                replies = self._recover(error, number)
            if replies:
                return self._finish(number, lr, attempt, replies, before, started)

    def _run_step(self, number: int, attempt: Attempt, lr: float, standpoint: Standpoint | None = None) -> list[Reply]:
        meta = {"step": number, "lr": lr, "tokens_per_second": self._tokens_per_second, **self._pacer.order()}
        meta["total_steps"], meta["sketch"] = attempt.total_steps, self.checks.on
        if standpoint is None:
            return self._ranks.send(Command.STEP, meta, attempt.parts, check=attempt.check)
        counts = [len(attempt.parts[replica]) for _, replica in sorted(attempt.replica_of.items())]
        meta["note"], note = self._notes.note(standpoint, attempt.epoch, counts, self._receipts.paid)
        return self._ranks.send(Command.STEP, meta, attempt.parts, note=note, check=attempt.check)

    def _finish(
        self,
        number: int,
        lr: float,
        attempt: Attempt,
        replies: list[Reply],
        before: tuple[int, int],
        started: float,
    ) -> tuple[StepResult, bool]:
        """`attempt` is the one that the ranks committed, or did not."""
        seconds = self._clock.monotonic() - started
        after, depths = self._connection.bytes_moved(), self._pacer.depths
        places = range(len(self.topology.members))  # those of aggregators included
        answers = [read_step(reply, places) for reply in replies]
        committed = bool(agreed(replies, "committed", [answer.committed for answer in answers]))
        agreed(replies, "loss", [answer.loss for answer in answers])
        agreed(replies, "gradient norm", [answer.grad_norm for answer in answers])
        agreed(replies, "weight", [answer.weight for answer in answers])
        moved = after[0] - before[0], after[1] - before[1]
        result = step_result(number, lr, answers, seconds, *moved, depths, slowest_of(replies, answers))
        self._rank_links = {reply.rank: answer.links for reply, answer in zip(replies, answers, strict=True)}
        if self._note_links is not None:
            self._note_links(self.topology, self._rank_links)
        if len(replies) == len(attempt.replica_of):  # else some came in just now
            result = self._replicas.complete(result, replies, answers)
        figures = {reply.rank: answer.figures for reply, answer in zip(replies, answers, strict=True)}
        self._pacer.observe(figures, max(map(len, attempt.parts)))
        self._tell_measures(attempt.parts)
        self._trained = self._trained or committed
        if committed:
            sparse = None if self._optimizer is None else self._optimizer.sparse
            self._apart = sparse is not None and not sparse.exchanges(number, attempt.total_steps)
            self._tokens_per_second = result.tokens_per_second
            self._report_units(number, attempt)
            self._conclude(number, attempt, replies)
            self._receipts.note(self._connection.job_id, attempt.epoch, progress_of(result))
        return result, committed

    def _conclude(self, number: int, attempt: Attempt, replies: Sequence[Reply]) -> None:
        if attempt.check is not None:
            batch = attempt.parts[attempt.replica_of[attempt.check.target]]
            key = UnitKey(
                job_id=self._connection.job_id, epoch=attempt.epoch, step=number, rank=Rank(attempt.check.target)
            )
            self.checks.conclude(attempt.check, Unit(key=key, micro_batches=len(batch)), replies, batch)

    def _recover(self, error: WorkerLostError, number: int | None) -> list[Reply]:
        """The answers of the ranks, where step `number` is committed after all."""
        if self._members is None:
            raise error
        members = self._members
        self._earlier_links += self._present_links()
        self._rank_links = {}
        return self._with_members(lambda: members.recover(error, number))

    def _with_members(self, change: Callable[[], list[Reply] | None]) -> list[Reply]:
        """Where state is lost, all ranks are given the module's weights: what they began with."""
        try:
            return change() or []
        except StateLostError:
            self._persisting(lambda: self._ranks.ship(self._loaded_optimizer))
            if self._trained:
                raise
            return []

    @property
    def _loaded_optimizer(self) -> OptimizerSpec:
        assert self._optimizer is not None, "loaded"
        return self._optimizer

    def _persisting(self, ask: Callable[[], T]) -> T:
        """Ask again in the next epoch where the present one ends meanwhile."""
        while True:
            try:
                return ask()
            except WorkerLostError as error:
                self._recover(error, None)

    def _tell_measures(self, parts: Sequence[Sequence[Mapping[str, Tensor]]]) -> None:
        """Whenever the ranks have measured themselves and their links."""
        figures = self._pacer.figures
        if figures and self._pacer.rounds != self._told_rounds:
            mean = max(1, round(self._ranks.mean_rows(parts)))
            self._note_measures(mesh_measures(self._ranks.pieces, self.topology, figures, mean))
            self._told_rounds = self._pacer.rounds

    def _report_units(self, step: int, attempt: Attempt) -> None:
        """For the epoch in which the work was done, by whoever did it, those included that are lost since."""
        units = [
            Unit(
                key=UnitKey(job_id=self._connection.job_id, epoch=attempt.epoch, step=step, rank=Rank(rank)),
                micro_batches=len(attempt.parts[replica]),
            )
            for rank, replica in attempt.replica_of.items()
        ]
        done = [unit for unit in units if unit.micro_batches > 0]
        self._micro_batches_done += sum(unit.micro_batches for unit in done)
        self._receipts.add(done)

    @property
    def drawing_modules(self) -> tuple[str, ...]:
        """Modules whose training forward draws random numbers, dropout above all."""
        return self._ranks.pieces.drawing_modules()

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """(mean loss, number of real elements); the loss is NaN where there is no real element."""
        return self._persisting(lambda: self._ranks.evaluate(batch))

    def gradients(self, batches: Sequence[Any], step: int = 0) -> tuple[float, dict[str, Tensor]]:
        """(mean loss over all `batches`, full gradients by parameter name), with the dropout of `step`."""
        return self._persisting(lambda: self._ranks.gradients(batches, step))

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the module, whole, from the first replica."""
        return self._persisting(self._ranks.state)

    def averages(self) -> dict[str, Tensor]:
        """The moving average of the trainable weights, in fp32 or wider; everything else as it is."""
        return {**self.state(), **self._persisting(self._ranks.averages)}

    def digests(self) -> list[str]:
        """A hash of all that each rank holds, weights and optimizer state, in rank order: equal on ranks of one place,
        where replicas hold the same."""
        self._complete()
        replies = self._persisting(lambda: self._connection.command(Command.DIGEST, {}))
        return [str(reply.meta.get("digest"))[:64] for reply in replies]

    def copy_into_module(self) -> None:
        fresh = self.state()
        with torch.no_grad():
            for name, target in named_tensors(self._model.module).items():
                if name in fresh:
                    target.copy_(fresh[name])

    def push(self) -> None:
        """Send the module's present weights to all ranks."""
        self._complete()
        self._persisting(self._ranks.push)

    def snapshot(self) -> JobSnapshot:
        """Let all ranks copy what they hold; the copies can be read while training goes on, as long as no member
        changes."""
        return self._persisting(lambda: self._ranks.snapshot(self._loaded_optimizer))

    def restore(self, saved: Saved) -> None:
        """Bring the optimizer state of a checkpoint to the ranks; their weights are the module's already."""
        self._complete()
        self._trained = True
        self._persisting(lambda: self._ranks.restore(saved))

    def exchange(self) -> None:
        """Let replicas that took steps of their own since the last exchange bring them together."""
        if self._apart:
            self._persisting(lambda: self._connection.command(Command.EXCHANGE, {}))
            self._apart = False

    def end(self, state: JobState, reason: str = "") -> None:
        """Give the workers back. Receipts that the hub has not taken yet get some seconds."""
        self._connection.end(state, reason)
        left = self._receipts.close(RECEIPT_SECONDS)
        if left:
            logger.warning(
                "the hub has not taken the receipts of %d finished units of job %s; their workers are not credited",
                left,
                self._connection.job_id,
            )
