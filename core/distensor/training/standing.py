"""Whether a trainer can still be used, and by which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distensor.core.errors import ConfigError, JobFailedError, StateLostError, UserError


class Standing:
    """Of one trainer.

    Attributes:
        ended: it was closed.
        failure: why its job failed; empty while it has not.
        lost: its ranks hold weights that are not those of the newest step, until a checkpoint was brought to them.
    """

    def __init__(self, name: str) -> None:
        self.ended = False
        self.failure = ""
        self.lost: StateLostError | None = None
        self._name = name
        self._using = threading.RLock()

    def check_alive(self) -> None:
        """Raise JobFailedError where this trainer has ended."""
        if self.ended or self.failure:
            why = f": {self.failure}" if self.failure else ""
            raise JobFailedError(
                f"trainer {self._name!r} has ended{why}; make a new Trainer to go on from model.module"
            )

    def check_state(self) -> None:
        """Raise what the state was lost with, unless it was regained."""
        if self.lost is not None:
            raise self.lost

    def check_regained(self, error: StateLostError, step: int, began: int) -> None:
        """A `fit` that began after step `began` goes on from `step`, if its own data leads from there.

        Raises:
            StateLostError: there is no checkpoint, or only an older one; this trainer has ended.
        """
        why = ""
        if self.lost is not None:
            why = "there is no checkpoint to go on from: give checkpoint=FOLDER and checkpoint_every=N"
        elif step < began:
            why = f"the latest checkpoint is of step {step}, and this fit began after step {began}"
        if why:
            self.failure = f"{error}; {why}"
            raise StateLostError(self.failure) from error

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """After an error of the job itself, the trainer has ended; after one of the user's batch it has not."""
        try:
            with self.exclusive():
                yield
        except UserError:
            raise
        except StateLostError as error:
            self.lost = error
            raise
        except KeyboardInterrupt:
            self.failure = "interrupted in the middle of a command"
            raise
        except BaseException as error:  # whatever it was, the ranks may be in the middle of a command
            self.failure = f"{type(error).__name__}: {error}"
            raise

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Raises ConfigError where another thread uses the trainer."""
        if not self._using.acquire(blocking=False):
            raise ConfigError(f"trainer {self._name!r} is in use by another thread; a Trainer belongs to one at a time")
        try:
            yield
        finally:
            self._using.release()
