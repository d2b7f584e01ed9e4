"""A rank that holds nothing gets programs, weights and optimizer state from ranks that do; from several at once.

Source number i of k sends every k-th tensor by name. Each tensor comes with its SHA-256; the joiner checks them, and
then loads what it got as if the driver had sent it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distensor.core.errors import FrameError, ProgramRejectedError
from distensor.node.orders import parse_plan, split_parts
from distensor.node.snapshots import restore
from distensor.node.step_report import Decided
from distensor.transport import Channel
from distensor.transport.driver import receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.transport import DataPlane

_STATE = "state/"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOrder:
    """What a `share` command asks of this rank. Ranks of the present epoch."""

    sources: tuple[int, ...]
    joiners: tuple[int, ...]
    step: int


def parse_share(meta: Mapping[str, Any], world_size: int) -> ShareOrder:
    """Raises ProgramRejectedError naming what is wrong."""

    def ranks(key: str) -> tuple[int, ...]:
        value = meta.get(key, [])
        if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < world_size for rank in value):
            raise ProgramRejectedError(f"share: {key}={str(value)[:100]}, expected ranks below {world_size}")
        return tuple(value)

    step = meta.get("step", 0)
    if type(step) is not int or step < 0:
        raise ProgramRejectedError(f"share: step={str(step)[:20]}, expected a whole number from 0")
    return ShareOrder(sources=ranks("sources"), joiners=ranks("joiners"), step=step)


def holdings(engine: ShardEngine) -> dict[str, Tensor]:
    """Everything that training depends on: weights and buffers, and under "state/" what the optimizer keeps."""
    weights, state = engine.everything()
    fields = {f"{_STATE}{key}/{name}": value for key, own in state.items() for name, value in own.items()}
    return weights | fields


def digest(engine: ShardEngine) -> str:
    """SHA-256 over all holdings, their names, dtypes and shapes: equal on ranks that hold the same to the bit."""
    whole = hashlib.sha256()
    for key, tensor in sorted(holdings(engine).items()):
        whole.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} {_hash(tensor)}\n".encode())
    return whole.hexdigest()


def give(
    engine: ShardEngine,
    plan: Mapping[str, Any],
    programs: Mapping[int, bytes],
    plane: DataPlane,
    rank: int,
    order: ShareOrder,
    sequence: int,
) -> None:
    """Send this rank's share to each joiner. `plan` and `programs` are those of the load command."""
    place = order.sources.index(rank)
    parts: dict[str, Tensor] = {
        f"program/{stage}": torch.frombuffer(bytearray(text), dtype=torch.uint8) for stage, text in programs.items()
    }
    parts.update({key if key.startswith(_STATE) else f"weight/{key}": own for key, own in holdings(engine).items()})
    mine = {
        key: tensor.detach().to("cpu").contiguous()
        for index, (key, tensor) in enumerate(sorted(parts.items()))
        if index % len(order.sources) == place
    }
    meta = {"hashes": {key: _hash(tensor) for key, tensor in mine.items()}, "load": dict(plan)}
    for joiner in order.joiners:
        send_named(plane, joiner, Channel.STATE, sequence, meta, mine)


def take(
    engine: ShardEngine, plane: DataPlane, order: ShareOrder, sequence: int, most: int | None
) -> tuple[Mapping[str, Any], dict[int, bytes]]:
    """Receive all shares, check them, and load them. Returns the plan and the programs, which a later joiner may need.

    Raises:
        FrameError: a tensor that is not what its hash says, or that came twice.
        ProgramRejectedError: a program or state that may not be loaded.
        PeerLostError: a source went away.
    """
    parts: dict[str, Tensor] = {}
    meta: Mapping[str, Any] = {}
    for source in order.sources:
        head, tensors = receive_named(plane, source, Channel.STATE, sequence, None, most=most)
        _check_hashes(source, head.get("hashes"), tensors, parts)
        parts |= tensors
        meta = head.get("load", {}) if isinstance(head.get("load"), dict) else {}
    state = {key.removeprefix(_STATE): parts.pop(key) for key in list(parts) if key.startswith(_STATE)}
    programs, weights = split_parts(parts)
    parts.clear()
    engine.load(parse_plan(meta), programs, weights)
    restore(engine, state)
    engine.decided = Decided(number=order.step, report=None)
    return meta, programs


def _check_hashes(source: int, hashes: Any, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    if not isinstance(hashes, dict) or set(hashes) != set(tensors):
        raise FrameError(f"rank {source} sent tensors without a hash for each")
    for key, tensor in tensors.items():
        if key in known:
            raise FrameError(f"rank {source} sent {key[:100]!r}, which another rank has sent too")
        if _hash(tensor) != hashes[key]:
            raise FrameError(f"rank {source} sent {key[:100]!r}, and it is not what its hash says")


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return hashlib.sha256().hexdigest()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
