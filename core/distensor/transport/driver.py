"""What the trainer (rank -1) and the workers say to each other on the data plane.

A command has a sequence number; it travels on CONTROL with `Tag.step = sequence`, its reply on REPLY with the same
number. Meta data is JSON, tensors follow by name. Large sets of tensors go in parts (`Tag.micro` counts them), so
that no frame has to hold a whole stage.

The first command of an epoch after the first is `status`: how far each rank got. `resolve` lets ranks carry out a step
that others have decided, `share` lets ranks that hold nothing get all from ranks that do (on STATE, from worker to
worker), and `digest` asks for a hash of what a rank holds. `take_over` comes from a driver that goes on in the place of
another: it asks for what that one left with the rank (`node/notebook.py`).

After a `snapshot` command the driver reads the copy that the worker has made piece by piece on SNAPSHOT, while other
commands go on: `Tag.step` counts its requests, each is answered with the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distensor.core.errors import FrameError
from distensor.transport.plane import DataPlane
from distensor.transport.tensors import decode_named, encode_named
from distensor.transport.types import Channel, Message, Tag

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
"""So much of a snapshot may stand before the answer to a command on the same connection."""

MAX_PARTS = 1 << 20
WITNESS_PREFIX = "witness/"
"""Of the names of another replica's batch, which a rank recomputes."""
NOTE_PREFIX = "note/"
"""Of the names of tensors that a driver leaves with its ranks (`node/notebook.py`)."""
ABORT_SEQUENCE = (1 << 40) - 1
"""The sequence number on which a worker always listens for the word to stop."""


class Command(StrEnum):
    LOAD = "load"
    STEP = "step"
    EVALUATE = "evaluate"
    GRADIENTS = "gradients"
    STATE = "state"
    REPLACE = "replace"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
    EXCHANGE = "exchange"
    STATUS = "status"
    RESOLVE = "resolve"
    SHARE = "share"
    JOIN = "join"
    DIGEST = "digest"
    TAKE_OVER = "take_over"
    PASS = "pass"  # noqa: S105 - no password: nothing is asked of this rank
    END = "end"
    ABORT = "abort"


class ReplyCode(StrEnum):
    OK = "ok"
    REFUSED_PROGRAM = "refused_program"
    PEER_LOST = "peer_lost"
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


def send_named(
    plane: DataPlane,
    peer: int,
    channel: Channel,
    sequence: int,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Send `meta` and `tensors` in as many parts as their size asks for."""
    parts = _split(tensors)
    for index, part in enumerate(parts):
        head = {"part": index, "parts": len(parts), "meta": dict(meta) if index == 0 else {}}
        header, buffers = encode_named(part, head)
        plane.send(peer, Tag(channel=channel, step=sequence, micro=index), header, buffers)


def receive_named(
    plane: DataPlane, peer: int, channel: Channel, sequence: int, timeout: float | None, *, most: int | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Receive what `send_named` sent. All parts together hold at most `most` bytes of tensors (None: no limit).

    Raises:
        PeerLostError, TransportTimeoutError, FrameError: as the plane does; also for parts that do not fit together.
    """
    first = plane.recv(peer, Tag(channel=channel, step=sequence), timeout)
    return finish_named(plane, peer, channel, sequence, first, timeout, most=most)


def finish_named(
    plane: DataPlane,
    peer: int,
    channel: Channel,
    sequence: int,
    first: Message,
    timeout: float | None,
    *,
    most: int | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Like `receive_named`, where the first part is there already."""
    head, tensors = decode_named(first)
    parts = head.get("parts")
    if not isinstance(parts, int) or not 1 <= parts <= MAX_PARTS or not isinstance(head.get("meta"), dict):
        raise FrameError(f"message {sequence} of peer {peer} has a header without parts and meta: {str(head)[:200]}")
    size = len(first.body)
    for index in range(1, parts):
        _check_size(peer, size, most)
        part = plane.recv(peer, Tag(channel=channel, step=sequence, micro=index), timeout)
        _, more = decode_named(part)
        if not more or not more.keys().isdisjoint(tensors):
            raise FrameError(f"part {index} of message {sequence} of peer {peer} is empty, or repeats a name")
        tensors.update(more)
        size += len(part.body)
    _check_size(peer, size, most)
    return head["meta"], tensors


def _check_size(peer: int, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise FrameError(f"peer {peer} sent {size} bytes of tensors; expected at most {most}")


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if parts[-1] and size + nbytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += nbytes
    return parts
