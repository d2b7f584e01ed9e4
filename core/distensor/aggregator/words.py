"""What replicas and aggregators say to each other on AGGREGATE of the data plane.

    replica    -> aggregator   step 0, micro HELLO: JSON {"group": ranks, "site": ranks, "others": ranks,
                               "patience": seconds or null}
    replica    -> aggregator   step n, micro UPDATE: the body is its message of round n, from 1
    aggregator -> aggregator   step n, micro SET: what the site of the sender has contributed
    aggregator -> replica      step n, micro SET: what all have contributed, without the replica's own bytes

The slot is the lowest rank of the group. The header of a set has a number for each member of the group, in the order
of their ranks: 0 for one that is not in it, else 1 more than the length of its message; the messages follow as the
body. Nothing is packed again: what arrives at a replica is what the others sent.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from distensor.core.errors import FrameError
from distensor.core.numbers import is_finite
from distensor.transport import Buffer, Channel, Message, Tag

MOST_MEMBERS = 1024
LONGEST_PATIENCE = 86_400.0


class Kind(IntEnum):
    """What a message is, as `Tag.micro`."""

    UPDATE = 0
    SET = 1
    HELLO = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Who exchanges. Ranks of the epoch, ascending.

    group: all replicas of one place of the mesh. site: those of them that this aggregator serves. others: the
    aggregators of the other sites. patience: seconds that a round waits after its first contribution for the others of
    the site; None: for as long as they live.
    """

    group: tuple[int, ...]
    site: tuple[int, ...]
    others: tuple[int, ...] = ()
    patience: float | None = None

    @property
    def slot(self) -> int:
        return self.group[0]

    def to_bytes(self) -> bytes:
        words = {"group": self.group, "site": self.site, "others": self.others, "patience": self.patience}
        return json.dumps(words, separators=(",", ":")).encode()


def read_hello(text: bytes, sender: int) -> Hello:
    """Raises FrameError for anything but a hello that `sender` may say."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or said.keys() != {"group", "site", "others", "patience"}:
        raise FrameError(f"hello of rank {sender}: {text[:80]!r}; expected group, site, others and patience")
    group, site, others = (_ranks(said[key], key, sender) for key in ("group", "site", "others"))
    patience = said["patience"]
    good = patience is None or (is_finite(patience) and 0 < patience <= LONGEST_PATIENCE)
    if sender not in site or not set(site) <= set(group) or set(others) & set(group) or not good:
        raise FrameError(
            f"hello of rank {sender}: group {group[:8]}, site {site[:8]}, others {others[:8]}, patience "
            f"{str(patience)[:20]}; it is in its site, a site is part of its group, aggregators are not"
        )
    return Hello(group=group, site=site, others=others, patience=patience)


def _ranks(value: object, key: str, sender: int) -> tuple[int, ...]:
    good = isinstance(value, list) and len(value) <= MOST_MEMBERS and all(type(r) is int and r >= 0 for r in value)
    if not good or not isinstance(value, list) or value != sorted(set(value)):
        raise FrameError(f"hello of rank {sender}: {key}={str(value)[:80]}; expected ascending ranks")
    return tuple(value)


def tag(kind: Kind, number: int, slot: int) -> Tag:
    return Tag(Channel.AGGREGATE, step=number, micro=kind, slot=slot)


def write_set(
    group: Sequence[int], found: Mapping[int, Buffer], leave_out: int | None = None
) -> tuple[bytes, list[Buffer]]:
    """Header and body of a set, without the bytes of `leave_out`, who has them."""
    lengths = [len(found[rank]) + 1 if rank in found else 0 for rank in group]
    body = [found[rank] for rank in group if rank in found and rank != leave_out and len(found[rank])]
    return struct.pack(f">{len(group)}Q", *lengths), body


def read_set(group: Sequence[int], message: Message, own: tuple[int, bytes] | None = None) -> dict[int, bytes]:
    """The contributions by rank. `own` is (rank, message) of the reader, whose bytes are not in it.

    Raises:
        FrameError: not a set of this group.
    """
    if len(message.header) != 8 * len(group):
        raise FrameError(f"a set with {len(message.header)} bytes of lengths for a group of {len(group)}")
    lengths = struct.unpack(f">{len(group)}Q", message.header)
    found: dict[int, bytes] = {}
    body, at = memoryview(message.body), 0
    for rank, length in zip(group, lengths, strict=True):
        if length and own is not None and rank == own[0]:
            found[rank] = own[1]
        elif length:
            found[rank] = bytes(body[at : at + length - 1])
            at += length - 1
    if at != len(body):
        raise FrameError(f"a set whose lengths make {at} bytes, with {len(body)} bytes")
    return found
