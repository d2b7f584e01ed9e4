"""Saves in the background: a step waits for the copy on the workers, never for a disk."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, suppress
from typing import Protocol

from distensor.core.errors import DistensorError, StoreError
from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_options import CheckpointOptions
from distensor.training.checkpoint_shards import FILE_BYTES, Fetch
from distensor.training.checkpoint_writing import Draft, write_checkpoint

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where the tensors of a draft come from, until they are released."""

    @property
    def fetch(self) -> Fetch: ...

    def release(self) -> None: ...


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread of its own.

    From the first save to `close`, other processes are kept from writing to the folder.
    """

    def __init__(self, options: CheckpointOptions, *, file_bytes: int = FILE_BYTES) -> None:
        self._options = options
        self._file_bytes = file_bytes
        self._folder = CheckpointFolder(options.path)
        self._held = ExitStack()
        self._locked = False
        self._thread: threading.Thread | None = None
        self._failure: DistensorError | None = None
        self.last: Saved | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self) -> None:
        """Take the folder. Raises StoreError where that is impossible, before anything was copied."""
        if not self._locked:
            self._held.enter_context(self._folder.writing())
            self._locked = True
            self._folder.sweep()

    def start(self, draft: Draft, source: Source) -> None:
        """Begin to write. An earlier save must have ended; its failure is forgotten."""
        self.prepare()
        self._failure = None
        self._thread = threading.Thread(target=self._run, args=(draft, source), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, draft: Draft, source: Source) -> None:
        try:
            self.last = write_checkpoint(
                self._folder, draft, source.fetch, keep=self._options.keep, file_bytes=self._file_bytes
            )
            logger.info("checkpoint of step %d is complete: %s", draft.step, self.last.path)
        except DistensorError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - a bug must be raised where somebody waits, not in this thread
            self._failure = StoreError(f"checkpoint of step {draft.step} failed: {error!r}")
        if self._failure is not None:
            logger.error("checkpoint of step %d was not saved: %s", draft.step, self._failure)
        with suppress(DistensorError):  # workers that are gone hold no copy
            source.release()

    def settle(self, timeout: float | None = None) -> None:
        """Until nothing is being written, or for `timeout` seconds. What failed has been logged."""
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Like `settle`.

        Raises:
            What made the newest save fail; once.
        """
        self.settle(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Give the folder back. What is still being written stays incomplete, and the next run sweeps it."""
        self._held.close()
        self._locked = False
