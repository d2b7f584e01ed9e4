"""A trainer's job: placed at the first batch, asked for what it holds, and given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from distensor.core import ParallelConfig
from distensor.core.control import JobState
from distensor.core.errors import BatchError, ConfigError
from distensor.training.checkpoint_folder import Saved
from distensor.training.checkpointing import Checkpointing
from distensor.training.job import TrainingJob
from distensor.training.options import TrainerOptions
from distensor.training.results import EarlierStep, Parity
from distensor.training.sessions import Session, current_session
from distensor.training.standing import Standing

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.optim import OptimizerSpec
    from distensor.program.losses import LossWeight
    from distensor.training.taking_over import TakenOver

Loss = Callable[[Any, Any], "Tensor"]


class JobHolder:
    """What a `Trainer` can do besides taking steps: look at its model, change it, end.

    The arguments are those of `Trainer`, checked.
    """

    def __init__(
        self,
        *,
        model: DistributedModel,
        parallel: ParallelConfig,
        options: TrainerOptions,
        optimizer: OptimizerSpec,
        loss: Loss | None,
        loss_weight: LossWeight,
        name: str,
        session: Session | None,
    ) -> None:
        self.options = options
        self.model = model
        self.parallel = parallel
        self.name = name
        self._optimizer = optimizer
        self._loss = loss
        self._loss_weight = loss_weight
        self._session = session
        self._attached: Session | None = None
        self._job: TrainingJob | None = None
        self._step = 0
        self._standing = Standing(name)
        self._checkpoints = None if options.checkpoint is None else Checkpointing(options.checkpoint)
        self._resumed: Saved | None = None
        self._taken: TakenOver | None = None

    @property
    def steps_done(self) -> int:
        """Committed optimizer steps."""
        return self._step

    @property
    def earlier(self) -> tuple[EarlierStep, ...]:
        """The newest steps under the trainer before this one, once a job was taken over and until its next step."""
        return () if self._taken is None else self._taken.earlier

    @property
    def job(self) -> TrainingJob | None:
        """The placed job, once the first step has been asked for."""
        return self._job

    def evaluate(self, data: Iterable[Any]) -> float:
        """The mean loss over all real elements of `data`, without dropout and without an update."""
        total = weight = 0.0
        for batch in data:
            job = self._ready(batch)
            with self._standing.noting_failure():
                loss, count = job.evaluate(batch)
            if count > 0:
                total, weight = total + loss * count, weight + count
        if weight == 0:
            raise BatchError("evaluate: the data holds no element to take a loss over")
        return total / weight

    def gradients(self, *batches: Any) -> dict[str, Tensor]:
        """The full gradient of the mean loss over `batches` by parameter name, without an update."""
        job = self._ready(*batches)
        with self._standing.noting_failure():
            return job.gradients(batches, self._step + 1)[1]

    def check_parity(self, batch: Any) -> Parity:
        """Run `batch` on the mesh and in this process, with the same weights, and compare loss and gradients.

        Raises:
            ConfigError: the model draws random numbers (dropout), so two runs differ whatever the mesh does.
        """
        from distensor.training.parity import compare

        job = self._ready(batch)
        self.pull()
        if job.drawing_modules:
            raise ConfigError(
                f"check_parity: {', '.join(job.drawing_modules[:5])} draws random numbers in training, so no two runs "
                "are equal; set its dropout to 0 for the check"
            )
        with self._standing.noting_failure():
            loss, gradients = job.gradients([batch])
        return compare(self.model.module, batch, self._loss, loss, gradients, self.options.precision)

    def state_dict(self) -> dict[str, Tensor]:
        """The full, unsharded weights and buffers by name; a tied weight is there once."""
        self._check_started()
        if self._job is None:
            return {name: tensor.detach().clone() for name, tensor in self.model.module.state_dict().items()}
        with self._standing.noting_failure():
            return self._job.state()

    def _check_started(self) -> None:
        """Raise ConfigError where the weights are on workers whose programs are not known here yet."""
        if self._job is None and self._taken is not None:
            raise ConfigError(
                f"trainer {self.name!r} has taken over job {self._taken.connection.job_id} and needs a batch to "
                "know its weights: call fit, step, or evaluate first"
            )

    def ema_state_dict(self) -> dict[str, Tensor]:
        """Like `state_dict`, with the moving average in place of each trainable weight, in fp32 or wider.

        Raises:
            ConfigError: the trainer was made without `ema`.
        """
        if self._optimizer.ema is None:
            raise ConfigError("ema_state_dict: this trainer keeps no moving average; make it with ema=0.999")
        if self._job is None:
            return self.state_dict()
        with self._standing.noting_failure():
            return self._job.averages()

    def pull(self) -> None:
        """Copy the weights of the mesh into `model.module`."""
        self._check_started()
        if self._job is not None:
            with self._standing.noting_failure():
                self._job.copy_into_module()

    def save(self, path: str) -> None:
        """Write the weights as one safetensors file, and nothing else of the run; `save_checkpoint` keeps all of it."""
        from distensor.training.files import save_weights

        save_weights(path, self.state_dict())

    def load(self, path: str) -> None:
        """Read weights that `save` wrote into the module and, where a job runs, into its ranks.

        Raises:
            ConfigError: names, shapes or dtypes are not the model's.
        """
        from distensor.training.files import load_weights

        load_weights(path, self.model.module)
        if self._job is not None:
            with self._standing.noting_failure():
                self._job.push()

    def _ready(self, *batches: Any) -> TrainingJob:
        if not batches:
            raise BatchError("a step needs at least one batch")
        self._standing.check_alive()
        self._standing.check_state()
        with self._standing.exclusive():
            if self._job is None:
                self._job = self._start(batches[0])
        return self._job

    def _start(self, batch: Any) -> TrainingJob:
        session = self._session or current_session()
        session.attach(self)
        self._attached = session
        if self._taken is not None:
            return TrainingJob.take_over(
                self._taken,
                session=session,
                model=self.model,
                options=self.options,
                optimizer=self._optimizer,
                loss=self._loss,
                loss_weight=self._loss_weight,
                example=batch,
                restorable=self._is_restorable,
            )
        return TrainingJob.start(
            session=session,
            name=self.name,
            model=self.model,
            options=self.options,
            optimizer=self._optimizer,
            loss=self._loss,
            loss_weight=self._loss_weight,
            example=batch,
            restored=self._resumed,
            restorable=self._is_restorable,
        )

    def _is_restorable(self) -> bool:
        if self._checkpoints is None:
            return self._step == 0
        self._checkpoints.settle()
        return self._step == 0 or self._checkpoints.folder.find() is not None

    @property
    def failure(self) -> str:
        """Why the job failed; empty while it has not."""
        return self._standing.failure

    def close(self, *, failed: str = "") -> None:
        """End the job and give its workers back. The session does it too; safe to call twice."""
        if self._standing.ended:
            return
        self._standing.ended = True
        reason = self._standing.failure or str(self._standing.lost or failed)
        if self._checkpoints is not None:
            self._checkpoints.close(failed=bool(reason))
        if self._job is None and self._taken is not None:
            self._taken.connection.leave()  # its workers keep what they hold for another try
        if self._job is not None:
            self._job.end(JobState.FAILED if reason else JobState.FINISHED, reason)
        if self._attached is not None:
            self._attached.detach(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed="" if error is None else f"{type(error).__name__}: {error}")
