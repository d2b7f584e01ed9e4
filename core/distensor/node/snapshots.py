"""A copy of what this rank holds, read by the driver piece by piece while training goes on.

Making the copy is all that a step waits for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distensor.core import DRIVER_RANK, Clock
from distensor.core.errors import TransportError
from distensor.transport import Channel
from distensor.transport.driver import PIECE_BYTES, ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.transport import DataPlane


STATE = "state/"
"""Before the name of what the optimizer keeps, where it stands beside the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    number: int
    tensors: Mapping[str, Tensor]


class SnapshotServer:
    """Holds at most one copy, for one peer. Its thread starts with the first one and ends with the connection to it."""

    def __init__(self, plane: DataPlane, peer: int = DRIVER_RANK) -> None:
        self._plane = plane
        self._peer = peer
        self._copy = _Copy(number=-1, tensors={})
        self._thread: threading.Thread | None = None

    def take(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into this machine's memory; an earlier copy is given up before."""
        self._copy = _Copy(number=-1, tensors={})
        copied = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
        self._copy = _Copy(number=number, tensors=copied)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"snapshots-for-{self._peer}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        request = 0
        try:
            while True:
                meta, _ = receive_named(self._plane, self._peer, Channel.SNAPSHOT, request, None, most=0)
                answer, tensors = self._answer(meta)
                send_named(self._plane, self._peer, Channel.SNAPSHOT, request, answer, tensors)
                request += 1
        except TransportError:
            self._copy = _Copy(number=-1, tensors={})  # the peer is gone, and nobody else may ask

    def _answer(self, meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One piece, with shape and hash of the whole where it is to be described, and `absent` where there is none.
        Where no tensor is named, the copy is no longer needed."""
        copy = self._copy
        key = meta.get("key")
        if meta.get("number") != copy.number:
            return _refused(f"snapshot {str(meta.get('number'))[:20]} is not here; {copy.number} is")
        if key is None:
            self._copy = _Copy(number=-1, tensors={})
            return {"code": ReplyCode.OK.value}, {}
        tensor = copy.tensors.get(key) if isinstance(key, str) else None
        if tensor is None:
            return {**_refused(f"{str(key)[:100]!r} is not part of snapshot {copy.number}")[0], "absent": True}, {}
        words, pieces = _piece(tensor, meta.get("start"))
        if meta.get("describe") is True:
            words |= {"shape": list(tensor.shape), "hash": hash_of(tensor)}
        return words, pieces


def take_snapshot(
    engine: ShardEngine, server: SnapshotServer, number: int, wanted: Sequence[str], clock: Clock
) -> dict[str, Any]:
    """Copy what this rank keeps of the `wanted` weights ("stage/name") and of their state ("stage/name/field").

    The answer says how many elements of each weight that is, which fields it has, and how long the copy took.

    Raises:
        ProgramRejectedError: a weight that is not here.
    """
    started = clock.monotonic()
    weights, state = engine.kept(wanted)
    fields = {f"{key}/{field}": value for key, fields in state.items() for field, value in fields.items()}
    server.take(number, weights | fields)
    return {
        "elements": {key: tensor.numel() for key, tensor in weights.items()},
        "fields": {key: sorted(fields) for key, fields in state.items() if fields},
        "copy_seconds": clock.monotonic() - started,
    }


def restore(engine: ShardEngine, tensors: Mapping[str, Tensor]) -> None:
    """Take over an optimizer's state ("stage/name/field"); a parameter of which nothing is given starts anew.

    Raises:
        ProgramRejectedError: state that is not this optimizer's.
    """
    engine.load_optimizer_state(by_parameter(engine, tensors))


def by_parameter(engine: ShardEngine, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """State named "stage/name/field", of each parameter that is trained here and of all that are named."""
    state: dict[str, dict[str, Tensor]] = {key: {} for key in engine.trained}
    for name, tensor in tensors.items():
        key, _, field = name.rpartition("/")
        state.setdefault(key, {})[field] = tensor.detach()
    return state


def hash_of(tensor: Tensor) -> str:
    """SHA-256 of the elements."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return hashlib.sha256().hexdigest()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def _piece(tensor: Tensor, start: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if type(start) is not int or not 0 <= start <= tensor.numel():
        return _refused(f"start={str(start)[:20]}: expected an element from 0 to {tensor.numel()}")
    count = min(tensor.numel() - start, max(1, PIECE_BYTES // tensor.element_size()))
    return {"code": ReplyCode.OK.value}, {"piece": tensor.view(-1).narrow(0, start, count)}


def _refused(why: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return {"code": ReplyCode.ERROR.value, "message": why}, {}
