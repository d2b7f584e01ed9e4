"""Batches as the windows of `fit`: `accumulate` batches make one optimizer step. Nothing here touches the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from distensor.core.errors import BatchError, ConfigError


def check_counts(epochs: object, max_steps: object) -> None:
    for keyword, value in (("epochs", epochs), ("max_steps", 1 if max_steps is None else max_steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"fit({keyword}={value!r}): expected an integer of at least 1")


def count_steps(data: Iterable[Any], *, epochs: int, accumulate: int, max_steps: int | None) -> int | None:
    """Optimizer steps that `windows` will give; None where `data` does not know its length.

    >>> count_steps([1, 2, 3], epochs=2, accumulate=2, max_steps=None)
    4
    """
    try:
        batches = len(data)  # type: ignore[arg-type]
    except TypeError:
        return max_steps
    total = epochs * -(-batches // accumulate)
    return total if max_steps is None else min(max_steps, total)


def windows(data: Iterable[Any], *, epochs: int, accumulate: int, max_steps: int | None) -> Iterator[tuple[Any, ...]]:
    """The batches of each optimizer step. Takes no more of `data` than it gives.

    A window does not reach over the end of an epoch: the last one of an epoch may hold fewer batches, and is given
    all the same.

    >>> list(windows([1, 2, 3], epochs=1, accumulate=2, max_steps=None))
    [(1, 2), (3,)]

    Raises:
        BatchError: an epoch without a batch.
    """
    done = 0
    for epoch in range(1, epochs + 1):
        empty = True
        for window in _grouped(data, accumulate):
            empty = False
            yield window
            done += 1
            if done == max_steps:
                return
        if empty:
            raise BatchError(
                f"fit: epoch {epoch} of {epochs} holds no batch; data that is used up after one pass, as a generator "
                "is, cannot be iterated again"
            )


def _grouped(data: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    window: list[Any] = []
    for batch in data:
        window.append(batch)
        if len(window) == size:
            yield tuple(window)
            window = []
    if window:
        yield tuple(window)
