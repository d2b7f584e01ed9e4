"""Frames: what the bytes on a data-plane connection mean. Pure; no socket.

    magic   version kind  channel reserved  epoch step micro slot header-length body-length
    4 bytes 1       1     1       1         8     8    4     8    4             8               (48 bytes, big-endian)

A frame is this prefix, then the header bytes, then the body bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from distensor.core.errors import FrameError
from distensor.transport.types import Buffer, Channel, FrameLimits, Tag

MAGIC = b"dTnF"
VERSION = 1
_PREFIX = struct.Struct("!4s4B2QIQIQ")
PREFIX_SIZE = _PREFIX.size
_CHANNELS = frozenset(Channel)


class FrameKind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    DATA = 4
    KEEP_ALIVE = 5
    GOODBYE = 6


_KINDS = frozenset(FrameKind)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A decoded frame prefix; header and body follow on the wire."""

    kind: FrameKind
    epoch: int
    tag: Tag
    header_size: int
    body_size: int


def encode_prefix(kind: FrameKind, epoch: int, tag: Tag, header_size: int, body_size: int) -> bytes:
    """The 48 bytes before header and body.

    Raises:
        FrameError: a number that does not fit its field.
    """
    try:
        return _PREFIX.pack(
            MAGIC, VERSION, kind, tag.channel, 0, epoch, tag.step, tag.micro, tag.slot, header_size, body_size
        )
    except struct.error as error:
        raise FrameError(
            f"tag {tag} with {header_size} header and {body_size} body bytes does not fit a frame: {error}; "
            "step and slot take 64 bits, micro 32, none is negative"
        ) from error


def decode_prefix(data: Buffer, *, epoch: int, limits: FrameLimits) -> Prefix:
    """Read the first 48 bytes of a frame and check them against what we would ever send.

    Raises:
        FrameError: not a frame of ours, a wrong epoch, or a size beyond `limits`.
    """
    if len(data) != PREFIX_SIZE:
        raise FrameError(f"a frame prefix has {PREFIX_SIZE} bytes, got {len(data)}")
    magic, version, kind, channel, reserved, its_epoch, step, micro, slot, header, body = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"a frame starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise FrameError(f"the peer speaks frame version {version}, we speak version {VERSION}")
    if kind not in _KINDS or channel not in _CHANNELS or reserved != 0:
        raise FrameError(f"unknown frame kind {kind}, channel {channel} or reserved byte {reserved}")
    if its_epoch != epoch:
        raise FrameError(f"a frame of epoch {its_epoch} arrived in epoch {epoch}")
    if header > limits.header or body > limits.body:
        raise FrameError(
            f"a frame of {header} header and {body} body bytes is over the limits of {limits.header} and {limits.body}"
        )
    return Prefix(FrameKind(kind), its_epoch, Tag(Channel(channel), step, micro, slot), header, body)
