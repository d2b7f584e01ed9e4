"""The peer-to-peer data plane. Importing this loads no torch; `tensors` and `c10d` do."""

from __future__ import annotations

from distensor.transport.link import SendHandle
from distensor.transport.listener import Listener
from distensor.transport.local_lanes import LocalMeeting
from distensor.transport.plane import DataPlane
from distensor.transport.relayed import relay_at
from distensor.transport.types import (
    Address,
    Buffer,
    Channel,
    Credentials,
    FrameLimits,
    LinkStats,
    Message,
    PathKind,
    PeerId,
    Tag,
    Timeouts,
    places_at,
)

__all__ = [
    "DataPlane",
    "Listener",
    "LocalMeeting",
    "SendHandle",
    "PeerId",
    "Address",
    "Credentials",
    "Channel",
    "Tag",
    "Message",
    "Buffer",
    "Timeouts",
    "FrameLimits",
    "LinkStats",
    "PathKind",
    "places_at",
    "relay_at",
]
