"""The values that callers of the data plane hold in their hands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias

from distensor.core.ids import DRIVER_RANK, Epoch, JobId, Rank, data_plane_uri

Buffer: TypeAlias = bytes | bytearray | memoryview


class NothingYetError(Exception):
    """Nothing has come of the next part of a frame, and who reads does not wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerId:
    """One place on the data plane: who a peer is, as its certificate says it."""

    job_id: JobId
    epoch: Epoch
    rank: Rank

    @property
    def uri(self) -> str:
        return data_plane_uri(self.job_id, self.epoch, self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Our key and certificate for one place, and the authority that both ends trust."""

    key_pem: bytes = field(repr=False)
    certificate_pem: str
    authority_pem: str


class PathKind(StrEnum):
    """The way by which two peers are connected."""

    HERE = "here"
    """On this machine."""
    LAN = "lan"
    IPV6 = "ipv6"
    PUBLIC = "public"
    RELAY = "relay"


class Channel(IntEnum):
    """What a message is about; messages of different channels never wait for each other."""

    CONTROL = 1
    REPLY = 2
    ACTIVATION = 3
    GRADIENT = 4
    COLLECTIVE = 5
    TIED = 6
    META = 7
    P2P = 8
    PROBE = 9
    SNAPSHOT = 10
    STATE = 11
    AGGREGATE = 12


class Tag(NamedTuple):
    """Which message of a peer is meant. Messages with equal tags keep their order."""

    channel: Channel
    step: int = 0
    micro: int = 0
    slot: int = 0

    def __str__(self) -> str:
        return f"{Channel(self.channel).name.lower()} step={self.step} micro={self.micro} slot={self.slot}"


class Message(NamedTuple):
    """What arrived. `body` belongs to the receiver and may be written to."""

    header: bytes
    body: Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds.

    `connect`: until all peers are connected. `silent`: how long a rank may say nothing at all before it counts as lost;
    every side sends keep-alives three times as often. `driver_silent`: the same of the driver, whose process runs the
    user's own code, which may hold the interpreter for as long as it likes. `stuck`: how long a peer may talk but take
    nothing of what is sent to it: it may be too busy to read, or the network is broken one way. `handshake`: how long a
    stranger may take to prove who it is. `goodbye`: how long `close` waits for queued messages to leave.
    """

    connect: float = 30.0
    silent: float = 3.0
    driver_silent: float = 30.0
    stuck: float = 120.0
    handshake: float = 10.0
    goodbye: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameLimits:
    """What a peer may make us hold. A larger header or body ends the connection with FrameError."""

    header: int = 16 << 20
    body: int = 8 << 30
    queued: int = 2 << 30
    """Bytes of messages of one peer that nobody has asked for yet; beyond it, no more is read from that peer for the
    time being, so that it has to wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkStats:
    """What went over the sockets to and from one peer, framing included.

    `rtt_seconds` is the shortest of the last few round trips of keep-alives; `rtt_at` is the monotonic time of the last
    one. Both are None until one came back: a peer of an older version sends none back.
    """

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    rtt_seconds: float | None = None
    rtt_at: float | None = None
    path: PathKind | None = None
    """The way by which the peer is reached; None where nobody has said it (a test's bare sockets)."""
    receive_rate: float | None = None
    """Bytes a second of the newest large message from it: what the line carried, our own cap included."""
    local: bool = False
    """Whether it goes over Unix sockets of this machine, in plain, instead of TLS."""


Peers: TypeAlias = Mapping[int, "Address | tuple[Address, ...]"]
"""Where each peer may be reached: one address, or several, the likeliest first."""


def places_at(hosts: Iterable[str], port: int) -> tuple[Address, ...]:
    """One port at several addresses of a machine."""
    return tuple(Address(host=host, port=port) for host in hosts)


def places_of(where: Address | tuple[Address, ...]) -> tuple[Address, ...]:
    return (where,) if isinstance(where, Address) else where


def peer_name(rank: int) -> str:
    return "the driver" if rank == DRIVER_RANK else f"rank {rank}"
