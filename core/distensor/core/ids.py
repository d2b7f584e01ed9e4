"""Ids are types: a rank is not a node, and mypy knows it."""

from __future__ import annotations

import re
import secrets
from typing import NewType

NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
WorkerId = NewType("WorkerId", str)
JobId = NewType("JobId", str)
Rank = NewType("Rank", int)
Epoch = NewType("Epoch", int)
Generation = NewType("Generation", int)

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
