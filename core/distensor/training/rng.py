"""The random number generators of this process and of a data loader, as tensors that a checkpoint can hold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distensor.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ROOMS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")
"""Where torch's loaders keep a generator of their own."""


def capture_rng(data: Any) -> dict[str, Tensor]:
    """States of torch's, Python's and numpy's global generators and of those that `data` holds, as bytes."""
    import numpy
    import torch

    states = {
        "torch": torch.get_rng_state(),
        "python": _packed("python", random.getstate(), lambda state: state),
        "numpy": _packed("numpy", _comparable(numpy.random.get_state(legacy=True)), _numpy_json),
    }
    states.update({f"loader.{index}": each.get_state() for index, each in enumerate(generators(data))})
    return states


def restore_rng(states: Mapping[str, Tensor], data: Any) -> None:
    """Put all generators back.

    Raises:
        CheckpointError: a state that is none, or another number of generators in `data` than was saved.
    """
    import numpy
    import torch

    own = generators(data)
    saved = [name for name in states if name.startswith("loader.")]
    if len(saved) != len(own):
        raise CheckpointError(
            f"the data has {len(own)} generators of its own, the checkpoint was made with {len(saved)}; "
            "resume with a loader that is built the same way"
        )
    try:
        torch.set_rng_state(states["torch"])
        random.setstate(_python_state(_unpack(states["python"])))
        numpy.random.set_state(tuple(_unpack(states["numpy"])))
        for index, generator in enumerate(own):
            generator.set_state(states[f"loader.{index}"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random number states cannot be restored: {error!r}") from error


def generators(data: Any) -> list[torch.Generator]:
    """Those that a loader, its sampler and its batch sampler hold, each once."""
    import torch

    found = [_generator_in(data, room) for room in _ROOMS]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _generator_in(data: Any, room: str) -> Any:
    holder = data
    for name in filter(None, room.split(".")):
        holder = getattr(holder, name, None)
    return getattr(holder, "generator", None)


_newest: dict[str, tuple[Any, Tensor]] = {}
"""The newest state of each stream, and as bytes: most steps draw nothing, and packing costs more than comparing."""


def _packed(stream: str, state: Any, to_json: Callable[[Any], Any]) -> Tensor:
    known = _newest.get(stream)
    if known is None or known[0] != state:
        known = _newest[stream] = state, _pack(to_json(state))
    return known[1].clone()


def _comparable(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return name, keys.tobytes(), keys.dtype, *rest


def _pack(state: Any) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpack(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _numpy_json(state: Any) -> list[Any]:
    import numpy

    name, keys, dtype, *rest = state
    return [name, numpy.frombuffer(keys, dtype=dtype).tolist(), *rest]


def _python_state(state: Any) -> Any:
    version, keys, gauss = state
    return version, tuple(keys), gauss
