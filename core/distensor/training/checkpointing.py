"""What a trainer does about checkpoints: when to save, what of the run goes in, and how to go on from one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor.core.errors import CheckpointError, ConfigError
from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_manifest import Group
from distensor.training.checkpoint_model import check_model, fill_model, model_tensors
from distensor.training.checkpoint_options import CheckpointOptions
from distensor.training.checkpoint_saving import BackgroundSaver
from distensor.training.checkpoint_settings import Resumed, resumed_lr, resumed_schedule
from distensor.training.checkpoint_shards import check_files, read_tensors, spec_of
from distensor.training.checkpoint_writing import Draft
from distensor.training.data_position import DataPosition, TrackedData
from distensor.training.job_snapshot import JobSnapshot, state_problems
from distensor.training.rng import restore_rng
from distensor.training.windows import windows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distensor.optim import LrSchedule, OptimizerSpec

logger = logging.getLogger(__name__)

FAILED_SECONDS = 10.0
"""How long a save may go on when the job has failed; where the workers are gone it fails at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedStart:
    """Where the data of a `fit` goes on; at its beginning where there is no position."""

    position: Mapping[str, Any] | None
    states: Mapping[str, Tensor]

    @classmethod
    def of(cls, saved: Saved) -> FeedStart:
        """Where a checkpoint was made."""
        return cls(position=saved.manifest.position, states=states_of(saved))


class Feed:
    """The data of one `fit`, from its beginning or from where it was interrupted.

    `steps` counts the optimizer steps of this `fit`, those before the interruption included.

    Raises:
        ConfigError, CheckpointError: the data is not that of the checkpoint.
    """

    def __init__(self, data: Iterable[Any], begin: FeedStart | None = None) -> None:
        self.data = TrackedData(data)
        self.steps = 0
        if begin is not None and begin.position is not None:
            position = DataPosition.from_json(begin.position)
            self.data.resume_at(position, {name: state.clone() for name, state in begin.states.items()})
            self.steps = position.steps
        self.running = True

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False

    def after_step(self) -> Feed | None:
        """To be called after each step. None once the `fit` is over: the step's batch was not one of this data."""
        if not self.running:
            return None
        self.steps += 1
        self.data.mark()
        return self

    def windows(self, *, epochs: int, accumulate: int, max_steps: int | None) -> Iterator[tuple[Any, ...]]:
        """The batches of each optimizer step that is left of `epochs` and `max_steps`."""
        left = None if max_steps is None else max_steps - self.steps
        if self.data.epoch >= epochs or (left is not None and left < 1):
            return iter(())
        return windows(self.data, epochs=epochs - self.data.epoch, accumulate=accumulate, max_steps=left)

    def coming(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Position and states as they are once the step in hand is committed."""
        position, states = self.data.coming(self.steps + 1)
        return position.to_json(), states

    def position(self) -> dict[str, Any]:
        return self.data.position(self.steps).to_json()


def states_of(saved: Saved) -> dict[str, Tensor]:
    return {name: state.clone() for name, state in read_tensors(saved.path, saved.manifest, Group.RNG)}


class Checkpointing:
    """The checkpoints of one trainer."""

    def __init__(self, options: CheckpointOptions) -> None:
        self._options = options
        self._saver = BackgroundSaver(options)
        self._overdue = False
        self.folder = CheckpointFolder(options.path)
        self._claimed = False
        self.settle = self._saver.settle

    @property
    def last(self) -> Path | None:
        """The newest checkpoint that this trainer has completed."""
        return None if self._saver.last is None else self._saver.last.path

    def claim(self) -> None:
        """Take the folder for this run, before its first step.

        Raises:
            ConfigError: it holds checkpoints of an earlier run that this one does not go on from; in time, they would
                be deleted for this run's.
            StoreError: another process writes there, or it cannot be made.
        """
        if self._claimed:
            return
        found = self.folder.find()
        if found is not None:
            raise ConfigError(
                f"checkpoint={str(self.folder.path)!r} holds checkpoints of an earlier run, the latest of step "
                f"{found.manifest.step}: go on with fit(resume=True) or trainer.resume(), or choose another folder"
            )
        self._saver.prepare()
        self._claimed = True

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saver.busy

    def due(self, step: int) -> bool:
        """Whether to save after `step`: never while an earlier save is still being written, but then as soon as it is
        done."""
        every = self._options.every
        self._overdue = self._overdue or (every is not None and step % every == 0)
        return self._overdue and not self._saver.busy

    def is_saved(self, step: int) -> bool:
        """Whether the newest complete checkpoint of this trainer is of `step`; waits for one that is being written."""
        self._saver.settle()
        return self._saver.last is not None and self._saver.last.manifest.step == step

    def begin(
        self, step: int, snapshot: JobSnapshot, module: nn.Module, run: Mapping[str, Any], feed: Feed | None
    ) -> None:
        """Write in the background; an earlier save has ended. Outside of a `fit` there is no feed."""
        self.claim()
        states = (TrackedData([]) if feed is None else feed.data).states()
        draft = Draft(
            step=step,
            specs={**snapshot.specs, Group.RNG: {name: spec_of(state) for name, state in states.items()}},
            aliases=model_tensors(module).aliases,
            run=run,
            position=None if feed is None else feed.position(),
        )
        self._overdue = False
        logger.info("step %d: all ranks have copied their state in %.3f s", step, snapshot.copy_seconds)
        self._saver.start(draft, _Both(snapshot, states))

    def wait(self) -> Path:
        """The checkpoint that was begun, once it is complete. Raises what made it fail."""
        self._saver.wait()
        assert self._saver.last is not None, "it did not fail"
        return self._saver.last.path

    def go_on(self) -> None:
        """The run goes on from somewhere else than its checkpoints, which are its own all the same. Raises
        StoreError."""
        self._saver.prepare()
        self._claimed = True

    def load(
        self,
        step: int | None,
        module: nn.Module,
        optimizer: OptimizerSpec,
        schedule: LrSchedule | Callable[[int], float] | None,
    ) -> Resumed | None:
        """Bring a checkpoint's weights into `module`, and this process's generators to where they were.

        Raises:
            ConfigError, CheckpointError: as `open_checkpoint` says; nothing was changed.
        """
        saved = open_checkpoint(self.folder, step, module, optimizer)
        if saved is None:
            return None
        self._saver.prepare()
        self._claimed = True
        run = saved.manifest.run
        found = Resumed(saved=saved, lr=resumed_lr(run, optimizer.lr), schedule=resumed_schedule(run, schedule))
        restore_global_rng(saved)
        fill_model(module, saved)
        return found

    def close(self, *, failed: bool) -> None:
        """Let a save that is being written end, and give the folder back."""
        self._saver.settle(FAILED_SECONDS if failed else None)
        self._saver.close()


class _Both:
    """Tensors of the job, and of this process."""

    def __init__(self, snapshot: JobSnapshot, states: Mapping[str, Tensor]) -> None:
        self._snapshot = snapshot
        self._states = states
        self.release: Callable[[], None] = snapshot.release

    def fetch(self, group: Group, name: str) -> Tensor:
        return self._states[name] if group is Group.RNG else self._snapshot.fetch(group, name)


def needed(checkpoints: Checkpointing | None, what: str) -> Checkpointing:
    """Raises ConfigError where a trainer was made without a folder for them."""
    if checkpoints is None:
        raise ConfigError(f"{what}: this trainer has no folder for checkpoints; make it with checkpoint=FOLDER")
    return checkpoints


def open_checkpoint(
    folder: CheckpointFolder, step: int | None, module: nn.Module, optimizer: OptimizerSpec
) -> Saved | None:
    """The checkpoint to go on from, checked as a whole; None where there is none.

    Raises:
        CheckpointError: damaged files, all of them named.
        ConfigError: it is of another model or another optimizer; or there is none of `step`.
    """
    saved = folder.find(step)
    if saved is None:
        if step is not None:
            raise ConfigError(f"{folder.path} holds no checkpoint of step {step}; it holds none at all")
        return None
    check_files(saved.path, saved.manifest)
    check_model(module, saved)
    problems = state_problems(saved, optimizer, dict(model_tensors(module).tensors))
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConfigError(f"{saved.path} holds another optimizer's state: {'; '.join(problems[:20])}{more}")
    return saved


def restore_global_rng(saved: Saved) -> None:
    """Torch's, Python's and numpy's generators of this process as they were at the moment of saving."""
    states = states_of(saved)
    if not states:
        raise CheckpointError(f"{saved.path} holds no random number states")
    restore_now(states)


def restore_now(states: Mapping[str, Tensor]) -> None:
    """The generators of this process, but not those of a loader. Raises CheckpointError."""
    restore_rng(
        {
            name.partition("/")[2]: state
            for name, state in states.items()
            if name.startswith("now/") and not name.startswith("now/loader.")
        },
        [],
    )
