"""Ids are types: a rank is not a node, and mypy knows it."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from distensor.core.errors import HandshakeError

NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
WorkerId = NewType("WorkerId", str)
JobId = NewType("JobId", str)
Rank = NewType("Rank", int)
Epoch = NewType("Epoch", int)
Generation = NewType("Generation", int)
AccountId = NewType("AccountId", str)
KeyId = NewType("KeyId", str)

DRIVER_RANK = Rank(-1)
"""The trainer's place on the data plane of its own job: a peer, but no rank of the mesh."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_valid_name(text: str) -> bool:
    """Whether `text` may name a node, a job or a worker: 1 to 63 letters, digits, dots, dashes, underscores."""
    return _NAME.fullmatch(text) is not None


def new_node_id() -> NodeId:
    return NodeId("n_" + secrets.token_hex(8))


def new_job_id() -> JobId:
    return JobId("j_" + secrets.token_hex(8))


def new_key_id() -> KeyId:
    return KeyId("k_" + secrets.token_hex(6))


_DATA_PLANE_URI = re.compile(
    r"distensor://([A-Za-z0-9][A-Za-z0-9._-]{0,62})/(0|[1-9][0-9]{0,17})/(-1|0|[1-9][0-9]{0,8})"
)


def data_plane_uri(job_id: JobId, epoch: Epoch, rank: Rank) -> str:
    """The SAN URI of one place on the data plane: who a peer is, as its certificate says it."""
    return f"distensor://{job_id}/{epoch}/{rank}"


def parse_data_plane_uri(text: str) -> tuple[JobId, Epoch, Rank]:
    """The inverse of `data_plane_uri`.

    Raises:
        HandshakeError: `text` is not such a URI.
    """
    found = _DATA_PLANE_URI.fullmatch(text)
    if found is None:
        raise HandshakeError(
            f"{text[:200]!r} names no place on the data plane; expected distensor://<job>/<epoch>/<rank>"
        )
    return JobId(found[1]), Epoch(int(found[2])), Rank(int(found[3]))
