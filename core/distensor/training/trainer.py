"""`Trainer`: the user's training loop, driven over the ranks of a job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig
from distensor.core.errors import (
    AuthenticationError,
    BatchError,
    ConfigError,
    ControlError,
    DivergedError,
    HubUnreachableError,
    JobFailedError,
    JobHeldError,
    StateLostError,
    UnsupportedOptionError,
)
from distensor.core.ids import JobId, is_valid_name
from distensor.core.problems import Problems
from distensor.optim import LrSchedule, OptimizerSpec, parse_lr_schedule
from distensor.sync import Sync
from distensor.training.checkpoint_settings import (
    check_settings,
    resumed_lr,
    resumed_schedule,
    run_settings,
    warn_of_changes,
)
from distensor.training.checkpointing import Checkpointing, Feed, FeedStart, needed, restore_now
from distensor.training.data_position import TrackedData
from distensor.training.job_holder import JobHolder, Loss
from distensor.training.notes import Standpoint
from distensor.training.optimizer_words import check_slices, read_optimizer
from distensor.training.options import TrainerOptions
from distensor.training.progress import ProgressBar
from distensor.training.rates import rate_of, resolved_schedule
from distensor.training.results import History, StepResult
from distensor.training.rewinding import resuming
from distensor.training.sessions import Session, current_session
from distensor.training.windows import check_counts, count_steps

if TYPE_CHECKING:
    from distensor.nn import DistributedModel
    from distensor.program.losses import LossWeight
    from distensor.training.job import TrainingJob

logger = logging.getLogger(__name__)


class Trainer(JobHolder):
    """Trains a `DistributedModel` on the ranks that `parallel` declares.

    The job is placed at the first step; until then nothing leaves this process. Every number is the same as in one
    process: gradients are means over the real elements of the whole batch, however it was cut.

    Args:
        model: the module and its cut.
        parallel: the mesh. tensor_parallel needs a `tp_spec` of the model, which says which weights are cut.
            context_parallel cuts dim 1 of the batch's tensors, the sequence.
        optimizer: the name of an optimizer of torch.optim in lower case ("adamw", "sgd", "adafactor", ...).
        optimizer_options: its options by torch's names, and "no_decay": patterns of the parameters that weight decay
            leaves alone, such as ["**.bias", "**.norm*"].
        lr: the learning rate, the highest one under a schedule; assign `trainer.lr` to change it between steps.
        lr_schedule: "constant", "linear", "cosine", "wsd", a `distensor.optim.LrSchedule`, or a function of the number
            of the optimizer step (1, 2, ...) that returns the learning rate of that step.
        ema: the decay of an exponential moving average of the weights, kept in fp32 by the workers and read with
            `ema_state_dict`; None for none.
        loss: None when the module returns a scalar or something with `.loss`; else `loss(outputs, batch)`.
        loss_weight: how many elements the loss is a mean over; only needed where that cannot be read off the loss.
            "rows", or a function of the batch.
        schedule: "1f1b" (its warm-up follows measured stages, links and memory), "gpipe", "looped_bfs", "zero_bubble";
            "interleaved" with several stages a rank; "zbv" with two, placed as a V: rank r holds stages r and 2P-1-r.
        sync: "allreduce": every replica holds all weights of its stages; "zero3": weights, gradients and optimizer
            state are cut over the replicas, and a stage's weights are whole only while it is used; "distro", "demo":
            each replica keeps its own gradients and sends a few bytes for each thousand weights; "diloco",
            "sparseloco": it takes many steps of its own between two exchanges (docs/distro.md).
        sync_options: of the last four, as docs/distro.md lists them: {"k": 32}, {"every": 50}.
        micro_batches: how many parts a replica's rows are cut into; by default twice the pipeline's ranks.
        clip_norm: the largest norm that the gradient of the whole model may have.
        norm_type: which norm: 2.0, 1.0 or "inf". `StepResult.grad_norm` is of this type too.
        accumulate: how many batches of `fit` make one optimizer step; the mean is over all their real elements. The
            last step of an epoch takes what is left. "gpipe" and "looped_bfs" hold the activations of all of them at
            once, the other schedules only as many as they run ahead.
        precision: "fp32" computes as the module itself does; "bf16" as under `torch.autocast("cpu", torch.bfloat16)`,
            on every device, with float32 parameters, gradients, sums and loss.
        recompute: "none" keeps all activations for the backward pass; "layer" keeps the inputs of each repeated module
            (model.layers.3), "stage" those of the whole stage, and computes the rest again.
        checkpoint: a folder for checkpoints: weights, optimizer state, random number states and the position in the
            data, as docs/checkpoints.md says. `fit` saves one at its end.
        checkpoint_every: also save after every so many steps, in the background.
        checkpoint_keep: how many complete checkpoints stay; by default 2.
        context_attention: how keys and values move with context_parallel above 1: "all_gather" (fewest messages),
            "ring" (least memory), "ulysses" (heads for chunks; at most as many ranks as heads).
        context_shares: proportions of the parts of the sequence, a positive integer for each rank of context_parallel:
            [3, 1] gives the first rank three quarters of the positions. By default all are equal.
        elastic: go on when workers are lost (docs/elastic.md): with the replicas that are left, later with new ones, or
            from the latest checkpoint. False: the job ends with an error.
        spot_checks: the share of units that other replicas compute too, to compare (docs/spot-checks.md); by default
            0.01 where three or more replicas are all that the mesh has, else none.
        wait: let the hub queue the job when there is no place for it now, and wait at the first step for as long as
            that takes. False: a mesh that is too small is an error at once.
        priority: among the jobs that wait at the hub the higher one is placed first; an account may have a limit.
        seed: of dropout.
        name: of the job, as providers see it.
        progress: show a progress bar in `fit`; by default where standard error is a terminal.

    Raises:
        ConfigError, UnsupportedOptionError: a wrong keyword, or one that this version does not implement.
    """

    def __init__(
        self,
        model: DistributedModel,
        *,
        parallel: ParallelConfig,
        optimizer: str = "adamw",
        lr: float = 1e-3,
        optimizer_options: Mapping[str, Any] | None = None,
        lr_schedule: LrSchedule | Callable[[int], float] | str | None = None,
        ema: float | None = None,
        loss: Loss | None = None,
        loss_weight: LossWeight = None,
        schedule: str = "1f1b",
        micro_batches: int | None = None,
        sync: str = "allreduce",
        sync_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        norm_type: float | str = 2.0,
        precision: str = "fp32",
        recompute: str = "none",
        context_attention: str = "all_gather",
        context_shares: Sequence[int] | None = None,
        accumulate: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        checkpoint_keep: int | None = None,
        elastic: bool = True,
        spot_checks: float | None = None,
        wait: bool = False,
        priority: int = 0,
        backend: str = "tls",
        seed: int = 0,
        name: str = "training",
        progress: bool | None = None,
        session: Session | None = None,
    ) -> None:
        problems = Problems()
        options = problems.check(
            TrainerOptions.of,
            model=model,
            parallel=parallel,
            schedule=schedule,
            micro_batches=micro_batches,
            sync=sync,
            clip_norm=clip_norm,
            norm_type=norm_type,
            precision=precision,
            recompute=recompute,
            context_attention=context_attention,
            context_shares=context_shares,
            accumulate=accumulate,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            checkpoint_keep=checkpoint_keep,
            backend=backend,
            lr_schedule=lr_schedule,
            seed=seed,
            elastic=elastic,
            spot_checks=spot_checks,
            wait=wait,
            priority=priority,
        )
        problems.check(_check_name, name)
        spec = problems.check(read_optimizer, model, optimizer, lr, optimizer_options, ema, sync, sync_options)
        if spec is not None:
            problems.check(check_slices, spec, parallel, sync)
        problems.report()
        assert options is not None, "no problem was reported"
        assert spec is not None, "no problem was reported"
        super().__init__(
            model=model,
            parallel=parallel,
            options=options,
            optimizer=spec,
            loss=loss,
            loss_weight=loss_weight,
            name=name,
            session=session,
        )
        self._lr_schedule = parse_lr_schedule(lr_schedule)
        self._progress = sys.stderr.isatty() if progress is None else progress
        self._feed: Feed | None = None
        self.lr = lr

    def fit(
        self,
        data: Iterable[Any],
        *,
        epochs: int = 1,
        max_steps: int | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        resume: bool | str = False,
    ) -> History:
        """Train on every batch of `data`, `epochs` times over, and bring the weights back into `model.module`.

        With `accumulate=K`, K batches make one optimizer step.

        Args:
            data: any iterable of tensors, tuples (inputs, targets) or dicts (keyword arguments of the module).
                For more than one epoch it must be iterable again.
            max_steps: stop after so many optimizer steps of this call.
            on_step: called with each step's result.
            resume: go on where the latest checkpoint was saved, with the next batch of the same pass over the data;
                `epochs` and `max_steps` still count from the beginning of the interrupted `fit`. Without a checkpoint
                begin at the beginning, so that a script may be started again and again with the same line. The id of a
                job: go on with its living workers, as `resume` says, and with the data from where they are.

        Raises:
            ConfigError, CheckpointError: the checkpoint is damaged, or not of this model, optimizer or data.
            BatchError: the data holds no batch, or one that cannot be cut.
            WorkerLostError, WorkerFailedError: a rank ended, and the job cannot go on without it; `on_step` has been
                called with every step before it.
        """
        check_counts(epochs, max_steps)
        if epochs > 1 and isinstance(data, Iterator):
            raise BatchError(
                f"fit(epochs={epochs}): {type(data).__name__} can be iterated once; give a list or a loader"
            )
        self._resume_for_fit(resume)
        feed, taken = Feed(data, self._feed_start() if resume else None), self._taken
        history = History(earlier=self.earlier)
        total = count_steps(data, epochs=epochs, accumulate=self.options.accumulate, max_steps=max_steps)
        total = None if total is None else max(0, total - feed.steps)
        self._lr_schedule = resolved_schedule(self._lr_schedule, self._step, total)
        began, last = 0 if taken is not None else self._step, None if total is None else self._step + total

        def steps(feed: Feed) -> Iterator[StepResult]:
            self._feed = feed
            with feed:
                for window in feed.windows(epochs=epochs, accumulate=self.options.accumulate, max_steps=max_steps):
                    yield self.step(*window, total_steps=last)

        with ProgressBar(self.name, total, shown=self._progress) as bar:
            for result in resuming(steps, feed, lambda error: self._rewound(error, data, began, bool(resume))):
                history.add(result)
                bar.update(result)
                if on_step is not None:
                    on_step(result)
        if self._taken is not None:  # its workers had done all steps
            self._ready(next(iter(data)))
        if self._job is not None:
            with self._standing.noting_failure():
                self._job.exchange()
        self.pull()
        if self._checkpoints is not None and history.steps and not self._checkpoints.is_saved(self._step):
            self.save_checkpoint()
        return history

    def _rewound(self, error: StateLostError, data: Iterable[Any], began: int, resumed: bool) -> Feed:
        """The data from where the latest checkpoint was saved, in this `fit` or at its beginning, step `began`."""
        if self._checkpoints is not None:
            self._checkpoints.settle()
            self.resume()
        self._standing.check_regained(error, self._step, began)
        return Feed(data, self._feed_start() if resumed or self._step > began else None)

    def _resume_for_fit(self, resume: bool | str) -> None:
        if isinstance(resume, str):
            self.resume(resume)
        elif resume and self._resumed is None and self._taken is None:
            self.resume()

    def _feed_start(self) -> FeedStart | None:
        if self._taken is not None:
            return FeedStart(position=self._taken.position, states=self._taken.states)
        return None if self._resumed is None else FeedStart.of(self._resumed)

    def _standpoint(self) -> Standpoint | None:
        """None where no other process could go on: the workers of a local session end with this one."""
        if self._attached is None or not self._attached.leaves_workers:
            return None
        feed = self._feed
        position, states = (None, TrackedData([]).states()) if feed is None or not feed.running else feed.coming()
        run = run_settings(self.options, self._optimizer, self.lr, self._lr_schedule)
        return Standpoint(position=position, states=states, run=run)

    def step(self, *batches: Any, total_steps: int | None = None) -> StepResult:
        """One optimizer step over the whole of `batches`, usually one.

        Several are accumulated: loss and gradient are means over the real elements of all of them together, as if
        they were one batch. They may differ in rows and in length.

        Raises:
            BatchError: a batch cannot be cut as declared; nothing has been sent.
            DivergedError: the loss is not a finite number; no rank has applied the update.
        """
        if self._checkpoints is not None:
            self._checkpoints.claim()
        number = self._step + 1
        rate = rate_of(self._lr_schedule, self.lr, number)
        job = self._ready(*batches)
        with self._standing.noting_failure():
            result, committed = job.step(number, batches, rate, total_steps, self._standpoint())
        if result.tokens == 0:
            raise BatchError(f"step {number}: the batch holds no element to take a loss over; nothing was updated")
        if not committed:
            raise DivergedError(
                f"step {number}: the loss is {result.loss} and the gradient norm {result.grad_norm}; "
                "no rank has applied the update"
            )
        self._step = number
        self._resumed = self._taken = None
        self._feed = None if self._feed is None else self._feed.after_step()
        if self._checkpoints is not None and self._checkpoints.due(number):
            self._begin_save(self._checkpoints, job)
        return result

    def save_checkpoint(self) -> Path:
        """Save now, and return the checkpoint's folder once it is complete on the disk.

        Raises:
            ConfigError: there is no `checkpoint` folder, or no step has placed the job yet.
            StoreError: it cannot be written. What was complete before still is.
        """
        checkpoints = needed(self._checkpoints, "save_checkpoint")
        self._standing.check_alive()
        if self._job is None:
            raise ConfigError("save_checkpoint: no step has been taken, so there is no optimizer state yet")
        checkpoints.settle()
        self._begin_save(checkpoints, self._job)
        return checkpoints.wait()

    def _begin_save(self, checkpoints: Checkpointing, job: TrainingJob) -> None:
        with self._standing.noting_failure():
            snapshot = job.snapshot()
        run = run_settings(self.options, self._optimizer, self.lr, self._lr_schedule)
        checkpoints.begin(self._step, snapshot, self.model.module, run, self._feed)

    def resume(self, at: int | str | None = None) -> int:
        """Go on from a checkpoint: weights, optimizer state, learning rate, step number and random number states. Or
        go on with the living workers of a job whose trainer has ended, from the newest step that they have committed.

        `fit(resume=True)` and `fit(resume=JOB)` do this and go on in the data too.

        Args:
            at: the step of a checkpoint, by default the latest; or the id of a job (`trainer.job.topology.job_id`),
                whose workers keep what they hold for some minutes. Where they are gone, the latest checkpoint is gone
                on from.

        Returns:
            The number of steps done; 0 where the folder holds no checkpoint.

        Raises:
            CheckpointError: it is damaged; all damaged files are named, and nothing was changed.
            ConfigError: it is of another model or optimizer, or there is none of that step; nothing was changed.
            JobHeldError: the job's trainer has not ended.
            JobFailedError: the job has ended or its workers are gone, and there is no checkpoint.
        """
        if isinstance(at, str):
            return self._resume_job(JobId(at))
        checkpoints = needed(self._checkpoints, "resume")
        self._standing.check_alive()
        found = checkpoints.load(at, self.model.module, self._optimizer, self._lr_schedule)
        if found is not None:
            if self._job is not None:
                with self._standing.noting_failure():
                    self._job.push()
                    self._job.restore(found.saved)
            self._step, self.lr, self._lr_schedule = found.step, found.lr, found.schedule
            self._standing.lost = self._taken = None
            self._resumed = found.saved
            warn_of_changes(found, run_settings(self.options, self._optimizer, self.lr, self._lr_schedule))
        return self._step

    def _resume_job(self, job_id: JobId) -> int:
        self._standing.check_alive()
        check_takeable(self._job is not None or self._taken is not None, self.options, self._optimizer)
        largest = max((each.nbytes for each in self.model.module.state_dict().values()), default=0)
        try:
            taken = (self._session or current_session()).take_over(job_id, largest)
        except (StateLostError, JobFailedError, ControlError) as error:
            if isinstance(error, AuthenticationError | HubUnreachableError | JobHeldError):
                raise
            return self._resume_instead(job_id, error)
        try:
            check_settings(taken.run, run_settings(self.options, self._optimizer, self.lr, self._lr_schedule))
            if self._checkpoints is not None:
                self._checkpoints.go_on()
        except BaseException:  # whatever it was, the workers are to wait for the next one who asks
            taken.connection.leave()
            raise
        self._taken, self._step = taken, taken.step
        if taken.run:
            self.lr = resumed_lr(taken.run, self._optimizer.lr)
            self._lr_schedule = resumed_schedule(taken.run, self._lr_schedule)
            restore_now(taken.states)
        logger.info("job %s goes on under this trainer after step %d", job_id, taken.step)
        return self._step

    def _resume_instead(self, job_id: JobId, error: Exception) -> int:
        if self._checkpoints is None or self._checkpoints.folder.find() is None:
            raise JobFailedError(
                f"job {job_id} cannot be taken over: {error}; and there is no checkpoint to go on from"
            ) from error
        logger.warning("job %s cannot be taken over: %s; going on from the latest checkpoint", job_id, error)
        return self.resume()


def check_takeable(busy: bool, options: TrainerOptions, optimizer: OptimizerSpec) -> None:
    """Raise ConfigError where a trainer cannot take over a job at all."""
    if busy:
        raise ConfigError("resume(JOB): this trainer has a job already; make a new Trainer")
    if options.sync is Sync.ZERO3 or optimizer.keeps_apart:
        raise UnsupportedOptionError(
            f"resume(JOB) with sync={options.sync.value!r}: what a worker holds does not fit another epoch; "
            "resume() goes on from a checkpoint"
        )


def _check_name(name: str) -> None:
    if not is_valid_name(name):
        raise ConfigError(f"name={name!r}: expected 1 to 63 letters, digits, dots, dashes or underscores")
