"""What a trainer leaves with its ranks at each step, so that another process can go on in its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distensor.core import Epoch
from distensor.transport.driver import NOTE_PREFIX

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Standpoint:
    """Where a trainer will stand once the step in hand is committed.

    Attributes:
        position: in the data of its `fit`; None outside of one.
        states: of random number generators, by "when/stream", as a checkpoint keeps them.
        run: its settings, as a checkpoint keeps them.
    """

    position: Mapping[str, Any] | None
    states: Mapping[str, Tensor]
    run: Mapping[str, Any]


class NoteSender:
    """Turns standpoints into what goes with a step: states only where they changed since the ranks got them."""

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self._sent: dict[str, Tensor] = {}

    def note(
        self, standpoint: Standpoint, epoch: Epoch, counts: Sequence[int], paid: int
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Words for all ranks and tensors for those that keep the note.

        `counts` are the micro-batches of each rank in this attempt; the hub has the receipts of all steps up to `paid`.
        """
        if epoch != self._epoch:
            self._epoch, self._sent = epoch, {}
        fresh = {
            name: state
            for name, state in standpoint.states.items()
            if name not in self._sent or not torch.equal(self._sent[name], state)
        }
        self._sent.update(fresh)
        words = {
            "position": standpoint.position,
            "run": standpoint.run,
            "parts": sorted(standpoint.states),
            "units": [int(epoch), *counts],
            "paid": paid,
        }
        return words, {f"{NOTE_PREFIX}{name}": state for name, state in fresh.items()}


def keepers(places: Mapping[int, tuple[int, int, int]]) -> Collection[int]:
    """The ranks that keep notes: the first place of each replica, of which one is left where a whole replica is."""
    return {rank for rank, place in places.items() if place == (0, 0, 0)}
