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
from distensor.node.orders import parse_number, parse_plan, parse_wanted, split_parts
from distensor.node.snapshots import STATE, by_parameter, hash_of, restore
from distensor.node.step_report import Decided
from distensor.program import StageProgram
from distensor.program.calls import TORCH_DTYPES
from distensor.sync import keyed
from distensor.transport import Channel
from distensor.transport.driver import receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.optim.updater import State
    from distensor.transport import DataPlane


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOrder:
    """What a `share` command asks of this rank. Ranks of the present epoch."""

    sources: tuple[int, ...]
    joiners: tuple[int, ...]
    step: int
    begin: bool
    """Only programs are shared: weights come while the others train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a source is to copy for a joiner: weights by "stage/name". `number` is the joiner's."""

    joiner: int
    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOrder:
    """What a `join` command asks of this rank: to fetch from `sources` what it lacks, or to copy what others asked
    for."""

    sources: tuple[int, ...]
    offers: tuple[Offer, ...]


def parse_join(meta: Mapping[str, Any], world_size: int) -> JoinOrder:
    """Raises ProgramRejectedError naming what is wrong."""
    offers = meta.get("offers", [])
    if not isinstance(offers, list) or not all(isinstance(offer, dict) for offer in offers):
        raise ProgramRejectedError(f"join: offers={str(offers)[:100]}, expected a list of objects")
    return JoinOrder(
        sources=_ranks("join", meta, "sources", world_size), offers=tuple(_offer(offer, world_size) for offer in offers)
    )


def _offer(found: Mapping[str, Any], world_size: int) -> Offer:
    (joiner,) = _ranks("join", {"joiner": [found.get("joiner")]}, "joiner", world_size)
    return Offer(joiner=joiner, number=parse_number(found, "number"), keys=tuple(parse_wanted(found)))


def _ranks(command: str, meta: Mapping[str, Any], key: str, world_size: int) -> tuple[int, ...]:
    value = meta.get(key, [])
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < world_size for rank in value):
        raise ProgramRejectedError(f"{command}: {key}={str(value)[:100]}, expected ranks below {world_size}")
    return tuple(value)


def parse_share(meta: Mapping[str, Any], world_size: int) -> ShareOrder:
    """Raises ProgramRejectedError naming what is wrong."""
    step = meta.get("step", 0)
    if type(step) is not int or step < 0:
        raise ProgramRejectedError(f"share: step={str(step)[:20]}, expected a whole number from 0")
    sources, joiners = (_ranks("share", meta, key, world_size) for key in ("sources", "joiners"))
    return ShareOrder(sources=sources, joiners=joiners, step=step, begin=meta.get("begin") is True)


def holdings(engine: ShardEngine) -> dict[str, Tensor]:
    """Everything that training depends on: weights and buffers, and under "state/" what the optimizer keeps."""
    return _flat(*engine.everything())


def _flat(weights: dict[str, Tensor], state: State) -> dict[str, Tensor]:
    fields = {f"{STATE}{key}/{name}": value for key, own in state.items() for name, value in own.items()}
    return weights | fields


def digest(engine: ShardEngine) -> str:
    """SHA-256 over all holdings, their names, dtypes and shapes: equal on ranks that hold the same to the bit."""
    whole = hashlib.sha256()
    for key, tensor in sorted(holdings(engine).items()):
        whole.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} {hash_of(tensor)}\n".encode())
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
    if order.begin:
        held: Mapping[str, Tensor] = {}
    else:
        held = _flat(*engine.handed_on()) if engine.exchanging else holdings(engine)
    parts.update({key if key.startswith(STATE) else f"weight/{key}": own for key, own in held.items()})
    mine = {
        key: tensor.detach().to("cpu").contiguous()
        for index, (key, tensor) in enumerate(sorted(parts.items()))
        if index % len(order.sources) == place
    }
    hashes = {key: hash_of(tensor) for key, tensor in mine.items()}
    meta = {"hashes": hashes, "load": dict(plan), "exchanges": engine.exchanges}
    for joiner in order.joiners:
        send_named(plane, joiner, Channel.STATE, sequence, meta, mine)


def take(
    engine: ShardEngine, plane: DataPlane, order: ShareOrder, sequence: int, most: int | None
) -> tuple[Mapping[str, Any], dict[int, bytes]]:
    """Receive all shares, check them, and load them. Returns the plan and the programs, which a later joiner may need.
    Where replicas exchange updates, a rank that has programs keeps what is its own.

    Raises:
        FrameError: a tensor that is not what its hash says, or that came twice.
        ProgramRejectedError: a program or state that may not be loaded.
        PeerLostError: a source went away.
    """
    parts: dict[str, Tensor] = {}
    meta: Mapping[str, Any] = {}
    exchanges = 0
    for source in order.sources:
        head, tensors = receive_named(plane, source, Channel.STATE, sequence, None, most=most)
        _check_hashes(source, head.get("hashes"), tensors, parts)
        parts |= tensors
        meta = head.get("load", {}) if isinstance(head.get("load"), dict) else {}
        exchanges = parse_number(head, "exchanges")
    state = {key.removeprefix(STATE): parts.pop(key) for key in list(parts) if key.startswith(STATE)}
    programs, weights = split_parts(parts)
    parts.clear()
    fresh, tensors = not engine.loaded, keyed(weights)
    if order.begin:
        engine.load(parse_plan(meta), programs, _empty_weights(programs))
        engine.await_weights()
    elif fresh or not engine.exchanging:
        engine.load(parse_plan(meta), programs, weights)
    if order.begin:
        assert not state, "programs only"
    elif engine.exchanging:
        engine.adopt(tensors, by_parameter(engine, state), exchanges, fresh=fresh)
    else:
        restore(engine, state)
    engine.decided = Decided(number=order.step, report=None)
    return meta, programs


def _empty_weights(programs: Mapping[int, bytes]) -> dict[int, dict[str, Tensor]]:
    """Room for all that the programs say they hold."""
    found = {}
    for stage, text in programs.items():
        program = StageProgram.from_json(text)
        specs = (*program.parameters, *program.buffers)
        found[stage] = {spec.name: torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in specs}
    return found


def _check_hashes(source: int, hashes: Any, tensors: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> None:
    if not isinstance(hashes, dict) or set(hashes) != set(tensors):
        raise FrameError(f"rank {source} sent tensors without a hash for each")
    for key, tensor in tensors.items():
        if key in known:
            raise FrameError(f"rank {source} sent {key[:100]!r}, which another rank has sent too")
        if hash_of(tensor) != hashes[key]:
            raise FrameError(f"rank {source} sent {key[:100]!r}, and it is not what its hash says")
