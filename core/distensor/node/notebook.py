"""What a driver leaves with its ranks, so that another process can go on in its place.

With each step the driver says where it will stand once that step is committed: words (position in the data, settings,
who is to be paid) and parts (states of random number generators), of which it sends those that have changed. A rank
keeps them as they are, and gives back those of the newest step that it has committed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.core.errors import ProgramRejectedError
from distensor.transport.driver import NOTE_PREFIX

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.step_report import StepReport

MOST_WORDS = 1 << 16
"""Characters of the words of one step."""
MOST_BYTES = 1 << 20
"""Of all parts together."""
MOST_STEPS = 4096
"""How many committed steps are remembered."""
MOST_UNPAID = 512
"""How many of them with who did the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Where the driver stands after a step."""

    words: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A committed step."""

    loss: float
    weight: float
    grad_norm: float
    units: Any


def parse_note(meta: Mapping[str, Any], tensors: dict[str, Tensor]) -> Note | None:
    """The note of a step command, whose parts are taken out of `tensors`; None where the driver leaves none.

    Raises:
        ProgramRejectedError: it is none, or larger than a rank keeps.
    """
    parts = {key.removeprefix(NOTE_PREFIX): tensors.pop(key) for key in list(tensors) if key.startswith(NOTE_PREFIX)}
    words = meta.get("note")
    if words is None:
        return None
    if not isinstance(words, dict) or len(json.dumps(words)) > MOST_WORDS:
        raise ProgramRejectedError(f"note={str(words)[:100]}: expected an object of at most {MOST_WORDS} characters")
    return Note(words=words, parts=parts)


class Notebook:
    """Of one rank, for as long as its process lives; a load command begins a new one."""

    def __init__(self) -> None:
        self._pool: dict[str, Tensor] = {}
        self._notes: OrderedDict[int, Note] = OrderedDict()
        self._done: OrderedDict[int, _Done] = OrderedDict()

    def begin(self, step: int, note: Note | None) -> None:
        """Step `step` begins. Raises ProgramRejectedError where a part is missing, or all are too large."""
        if note is None:
            return
        self._pool.update(note.parts)
        names = note.words.get("parts", [])
        if not isinstance(names, list) or not all(isinstance(name, str) and name in self._pool for name in names):
            raise ProgramRejectedError(f"note: parts={str(names)[:100]}, of which some never came")
        self._pool = {name: self._pool[name] for name in names}
        if sum(part.numel() * part.element_size() for part in self._pool.values()) > MOST_BYTES:
            raise ProgramRejectedError(f"note: its parts hold more than {MOST_BYTES} bytes")
        self._notes.pop(step, None)
        self._notes[step] = Note(words=note.words, parts=dict(self._pool))
        while len(self._notes) > 2:  # the step in hand, and the one before it
            self._notes.popitem(last=False)

    def commit(self, step: int, report: StepReport) -> None:
        """Step `step` is committed here."""
        words = self._notes[step].words if step in self._notes else {}
        self._done[step] = _Done(
            loss=report.loss, weight=report.weight, grad_norm=report.grad_norm, units=words.get("units")
        )
        while len(self._done) > MOST_STEPS:
            self._done.popitem(last=False)

    def answer(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Words and tensors for a driver that goes on after `step`, the newest that is committed here."""
        import torch

        note, done = self._notes.get(step), {number: each for number, each in self._done.items() if number <= step}
        paid = 0 if note is None or type(note.words.get("paid")) is not int else note.words["paid"]
        unpaid = [[number, each.units] for number, each in done.items() if number > paid and each.units is not None]
        rows = [[float(number), each.loss, each.weight, each.grad_norm] for number, each in done.items()]
        tensors = {} if note is None else {f"{NOTE_PREFIX}{name}": part for name, part in note.parts.items()}
        tensors["record"] = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
        return {"note": None if note is None else dict(note.words), "unpaid": unpaid[-MOST_UNPAID:]}, tensors
