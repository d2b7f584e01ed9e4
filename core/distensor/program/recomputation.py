"""Activation recomputation: a part of a tape keeps its inputs alone and runs again when its backward needs more.

Written after Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), over the hooks
for saved tensors of autograd, as torch.utils.checkpoint's non-reentrant form is. What is computed again comes from
the same operations on the same tensors, so gradients are equal to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from distensor.core.compute import Recompute
from distensor.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Steps `start` to `stop` of a tape. `inputs` are the slots that it reads from before it; None: it is kept."""

    start: int
    stop: int
    inputs: tuple[int, ...] | None = None


def layer_of(module: str) -> str | None:
    """The repeated module that a module is in: its name up to the first number.

    >>> layer_of("model.layers.3.mlp.up_proj")
    'model.layers.3'
    """
    parts = module.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return None if numbered is None else ".".join(parts[: numbered + 1])


def check_recompute(mode: Recompute, modules: Iterable[str]) -> None:
    """Raise ConfigError where `modules` hold no repeated one whose activations could be computed again."""
    if mode is Recompute.LAYER and not any(map(layer_of, modules)):
        raise ConfigError(
            "recompute='layer': no module of this model is in a list (as model.layers.3 is); "
            "use recompute='stage' or 'none'"
        )


def segments(
    modules: Sequence[str], reads: Sequence[Sequence[int]], writes: Sequence[int], held: Set[int], mode: Recompute
) -> tuple[Segment, ...]:
    """The parts of a tape, whose steps belong to `modules`, read and write slots; `held` slots are always there."""
    if mode is Recompute.NONE:
        return (Segment(start=0, stop=len(modules)),)
    return tuple(_segments(modules, reads, writes, held, mode))


def _segments(
    modules: Sequence[str], reads: Sequence[Sequence[int]], writes: Sequence[int], held: Set[int], mode: Recompute
) -> Iterator[Segment]:
    start = 0
    for key, members in groupby(modules, key=layer_of if mode is Recompute.LAYER else _anything):
        stop = start + len(list(members))
        made = set(writes[start:stop])
        read = dict.fromkeys(slot for step in reads[start:stop] for slot in step if slot not in made)
        inputs = tuple(slot for slot in read if slot not in held)
        yield Segment(start=start, stop=stop, inputs=None if key is None else inputs)
        start = stop


def _anything(module: str) -> str:
    del module
    return "stage"


class _Saved:
    """What autograd holds instead of a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _Complete(Exception):  # noqa: N818 - a signal between a hook and its caller, no error
    """Everything that was saved has been computed again; the rest of the segment is not needed."""


class Recomputation:
    """One run of one segment: `with recomputation: run()`, then its backward calls `run` once more.

    What came back is given up as autograd lets go of each tensor.
    """

    def __init__(self, again: Callable[[], None]) -> None:
        self._again: Callable[[], None] | None = again
        self._saved: list[weakref.ref[_Saved]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        del tensor
        saved = _Saved()
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            self._fill()
        assert saved.tensor is not None, "the second run saves what the first one saved"
        return saved.tensor

    def _fill(self) -> None:
        """Run again, with its own graph that is thrown away, up to the last tensor that was saved."""
        again, self._again = self._again, None
        assert again is not None, "one second run fills everything"
        waiting = iter(self._saved)
        left = len(self._saved)

        def take(tensor: Tensor) -> None:
            nonlocal left
            saved = next(waiting)()
            if saved is not None:
                saved.tensor = tensor.detach()
            left -= 1
            if left == 0:
                raise _Complete

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(take, _unused):
            try:
                again()
            except _Complete:
                return


def _unused(packed: object) -> Tensor:
    raise AssertionError(f"nothing goes backward through the second run; got {packed!r}")
