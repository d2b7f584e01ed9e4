"""Where in its data a run is, and how to get there again: the same batches, each once, in the same order.

A shuffling loader draws its order from a generator when an epoch starts. So the state of all generators at that moment,
and the number of batches taken since, say everything; getting there again means drawing the same order and passing over
what was trained. The states at the moment of saving come on top, for code that draws between the batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distensor.core.errors import CheckpointError, ConfigError
from distensor.training.rng import capture_rng, restore_rng

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """Between two batches.

    Attributes:
        epoch: complete passes over the data.
        batches: batches of the present pass that were trained.
        steps: optimizer steps of this `fit`, so that its `max_steps` goes on counting.
        length: batches of one pass, where the data knows it.
    """

    epoch: int
    batches: int
    steps: int
    length: int | None

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batches": self.batches, "steps": self.steps, "length": self.length}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DataPosition:
        """Raises CheckpointError for what is no position."""
        counts = {name: content.get(name) for name in ("epoch", "batches", "steps", "length")}
        for name, value in counts.items():
            if not (type(value) is int and value >= 0) and not (name == "length" and value is None):
                raise CheckpointError(
                    f"data position {str(dict(content))[:200]}: {name} must be a number of at least 0"
                )
        return cls(**counts)  # type: ignore[arg-type]  # checked just above


class TrackedData:
    """Gives the batches of `data` as they are, one pass for each `iter`, and knows how far it is.

    Use `resume_at` before the first pass to begin where another process stopped.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._begun: Iterator[Any] | None = None
        self._epoch_start: dict[str, Tensor] = {}
        self._trained: tuple[int, int, Mapping[str, Tensor]] = (0, 0, {})
        self.epoch = 0
        self.batches = 0

    def mark(self) -> None:
        """What was given so far has been trained. What is given but never trained is no part of a position."""
        self._trained = (self.epoch, self.batches, self._epoch_start)

    def position(self, steps: int) -> DataPosition:
        """That of the last `mark`."""
        epoch, batches, _ = self._trained
        return DataPosition(epoch=epoch, batches=batches, steps=steps, length=length_of(self._data))

    def states(self) -> dict[str, Tensor]:
        """All generators, now and as the pass of the last `mark` began, by "when/stream"."""
        now = {f"now/{name}": state for name, state in capture_rng(self._data).items()}
        return {**now, **{f"epoch/{name}": state for name, state in self._trained[2].items()}}

    def coming(self, steps: int) -> tuple[DataPosition, dict[str, Tensor]]:
        """Position and states as they are once what was given so far has been trained."""
        position = DataPosition(epoch=self.epoch, batches=self.batches, steps=steps, length=length_of(self._data))
        now = {f"now/{name}": state for name, state in capture_rng(self._data).items()}
        return position, {**now, **{f"epoch/{name}": state for name, state in self._epoch_start.items()}}

    def resume_at(self, position: DataPosition, states: Mapping[str, Tensor]) -> None:
        """Draw the order of the interrupted pass again and pass over what was trained.

        Raises:
            ConfigError: the data gives another number of batches than it did.
            CheckpointError: the states do not fit.
        """
        length = length_of(self._data)
        if length != position.length:
            raise ConfigError(
                f"the data gives {length} batches a pass, the checkpoint's gave {position.length}: its position "
                f"(pass {position.epoch}, batch {position.batches}) means nothing here. Give the same data and batch "
                "size, or start the data anew: trainer.resume(), then fit without resume=True"
            )
        self.epoch = position.epoch
        begun = self._pass_over(position, _part(states, "epoch")) if position.batches else None
        restore_rng(_part(states, "now"), self._data)
        if begun is not None:
            self._look_ahead(begun)
        self.mark()

    def _pass_over(self, position: DataPosition, states: Mapping[str, Tensor]) -> Iterator[Any]:
        restore_rng(states, self._data)
        self._epoch_start = dict(states)
        begun = iter(self._data)
        self.batches = sum(1 for _ in itertools.islice(begun, position.batches))
        if self.batches < position.batches:
            raise ConfigError(
                f"the data ended after {self.batches} batches; the checkpoint was made after {position.batches} of "
                f"pass {position.epoch}"
            )
        return begun

    def _look_ahead(self, begun: Iterator[Any]) -> None:
        """A pass that was trained to its end is over, although its last batch could not know that."""
        try:
            first = next(begun)
        except StopIteration:
            self.epoch, self.batches = self.epoch + 1, 0
        else:
            self._begun = itertools.chain([first], begun)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        if begun is None:
            self._epoch_start = capture_rng(self._data)
            begun, self.batches = iter(self._data), 0
        for batch in begun:
            self.batches += 1
            yield batch
        self.epoch, self.batches = self.epoch + 1, 0


def _part(states: Mapping[str, Tensor], when: str) -> dict[str, Tensor]:
    return {name.partition("/")[2]: state for name, state in states.items() if name.startswith(f"{when}/")}


def length_of(data: Any) -> int | None:
    """Batches of one pass; None where the data does not know."""
    try:
        return len(data)
    except TypeError:
        return None
