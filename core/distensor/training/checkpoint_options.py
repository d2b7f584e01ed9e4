"""The keywords of `Trainer` that are about checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from distensor.core.errors import ConfigError

KEPT = 2
"""One more than is needed: the newest may be of a run that had gone wrong before anybody saw it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """`every`: optimizer steps between saves in the background, None for none. `keep`: complete ones that stay."""

    path: Path
    every: int | None
    keep: int


def checkpoint_options(checkpoint: object, every: object, keep: object) -> CheckpointOptions | None:
    """Raises ConfigError naming the keyword, its value and what would be right."""
    for keyword, value in (("checkpoint_every", every), ("checkpoint_keep", keep)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{keyword}={value!r}: expected a whole number of at least 1")
        if value is not None and checkpoint is None:
            raise ConfigError(f"{keyword}={value!r} needs checkpoint=FOLDER, where the checkpoints go")
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, str | os.PathLike) or not os.fspath(checkpoint):
        raise ConfigError(f"checkpoint={checkpoint!r}: expected a folder")
    kept = KEPT if keep is None else keep
    assert every is None or isinstance(every, int), "checked above"
    assert isinstance(kept, int), "checked above"
    return CheckpointOptions(path=Path(os.fspath(checkpoint)).expanduser(), every=every, keep=kept)
