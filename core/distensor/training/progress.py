"""The progress bar of `fit`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distensor.training.results import StepResult

LOG_SECONDS = 5.0
"""Between two states of the bar where they do not overwrite each other, as in a log file."""


class ProgressBar:
    """tqdm with loss and rate; nothing at all where it is not shown."""

    def __init__(self, name: str, total: int | None, *, shown: bool) -> None:
        self._bar: Any = None
        self._warm_up: tuple[int, ...] = ()
        if shown:
            from tqdm import tqdm

            seconds = 0.1 if sys.stderr.isatty() else LOG_SECONDS
            self._bar = tqdm(total=total, desc=name, unit="step", dynamic_ncols=True, mininterval=seconds)

    def update(self, result: StepResult) -> None:
        if self._bar is not None:
            if result.warm_up != self._warm_up:
                self._warm_up = result.warm_up
                if result.warm_up:
                    depths = f"1f1b: the ranks of a pipeline run {result.warm_up} forwards ahead"
                    self._bar.write(depths, file=sys.stderr)
            self._bar.set_postfix_str(f"loss {result.loss:.4f}  {result.tokens_per_second:,.0f} tok/s", refresh=False)
            self._bar.update()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
