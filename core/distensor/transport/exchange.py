"""Parts of tensors between the members of one group, for one collective at a time.

A member that fails tells the others, so that nobody waits for a peer that has given up.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distensor.core.clock import Clock
from distensor.core.errors import PeerLostError, TransportError, TransportTimeoutError
from distensor.transport.link import SendHandle
from distensor.transport.plane import DataPlane
from distensor.transport.tensors import tensor_bytes
from distensor.transport.types import Channel, Message, Tag, peer_name

_LOOK_FOR_ABORTS_EVERY = 0.2
_ABORT_STEP = (1 << 63) - 1
_PEER_LOST, _OTHER = 0, 1
_ABORT = struct.Struct("!Bq")


def group_slot(name: str, ranks: Sequence[int]) -> int:
    """The number that marks a group's messages; the same on every member."""
    text = f"{name}|{','.join(map(str, ranks))}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8])


@dataclass(slots=True, eq=False)
class Exchange:
    """A group's use of the data plane. Members are named by their index in the group."""

    plane: DataPlane
    ranks: tuple[int, ...]
    me: int
    slot: int
    timeout: float
    clock: Clock
    _sequence: int = 0
    _what: str = ""
    _signature: bytes = b""
    _deadline: float = 0.0
    _handles: list[SendHandle] = field(default_factory=list)
    _others: frozenset[int] = field(init=False)
    _abort_tag: Tag = field(init=False)

    def __post_init__(self) -> None:
        self._abort_tag = Tag(Channel.COLLECTIVE, step=_ABORT_STEP, slot=self.slot)
        self._others = frozenset(rank for rank in self.ranks if rank != self.ranks[self.me])

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> list[int]:
        """The other members, beginning after our own index, so that not everybody sends to the same one first."""
        return [(self.me + offset) % self.size for offset in range(1, self.size)]

    def begin(self, what: str, signature: str) -> None:
        """Start the next collective. `signature` must be the same on every member.

        Raises:
            PeerLostError: a member is lost.
        """
        self._sequence += 1
        self._what, self._signature = what, signature.encode()
        self._deadline = self.clock.monotonic() + self.timeout
        self._handles.clear()
        for rank in self._others:
            self.plane.check(rank)
        self._raise_if_aborted()

    def send(self, peer: int, part: int, data: Tensor | None = None) -> SendHandle:
        """Queue a contiguous piece for a member; it must not change before the handle is done."""
        buffers = () if data is None else (tensor_bytes(data),)
        handle = self.plane.send(self.ranks[peer], self._tag(part), self._signature, buffers)
        self._handles.append(handle)
        return handle

    def receive(self, peer: int, part: int, like: Tensor | None = None) -> Tensor:
        """A member's piece, flat, with the dtype and number of elements of `like`.

        Raises:
            TransportError: the member takes part with something else, has given up, or is lost.
        """
        message = self._await(peer, self._tag(part))
        # The timeout is for silence, not for the whole: a large tensor over a slow link may take its time.
        self._deadline = self.clock.monotonic() + self.timeout
        self._check_signature(peer, message.header)
        expected = 0 if like is None else like.numel() * like.element_size()
        if len(message.body) != expected:
            raise TransportError(
                f"{self._what}: {peer_name(self.ranks[peer])} sent {len(message.body)} bytes where {expected} belong; "
                "every rank must pass the same sizes"
            )
        if like is None or expected == 0:
            return torch.empty(0, dtype=torch.uint8 if like is None else like.dtype)
        return torch.frombuffer(message.body, dtype=torch.uint8).view(like.dtype)

    def _check_signature(self, peer: int, found: bytes) -> None:
        if found != self._signature:
            raise TransportError(
                f"{self._what}: {peer_name(self.ranks[peer])} takes part with {found.decode(errors='replace')!r} and "
                f"{peer_name(self.ranks[self.me])} with {self._signature.decode()!r}; every rank must pass the same"
            )

    def finish(self) -> None:
        """Wait until our own pieces are out: their memory belongs to the caller again."""
        for handle in self._handles:
            handle.wait(self.timeout)
        self._handles.clear()

    def give_up(self, error: BaseException) -> None:
        """Tell the members that are left that this one will not answer any more."""
        kind, rank = (_PEER_LOST, error.rank) if isinstance(error, PeerLostError) else (_OTHER, 0)
        reason = error.reason if isinstance(error, PeerLostError) else f"{type(error).__name__}: {error}"
        text = _ABORT.pack(kind, rank) + reason.encode()[:500]
        for peer in self._others - self.plane.lost().keys():
            try:
                self.plane.send(peer, self._abort_tag, text)
            except PeerLostError:
                continue  # it knows that something is wrong

    def _tag(self, part: int) -> Tag:
        return Tag(Channel.COLLECTIVE, step=self._sequence, micro=part, slot=self.slot)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - self.clock.monotonic())

    def _await(self, peer: int, tag: Tag) -> Message:
        rank = self.ranks[peer]
        while (remaining := self._remaining()) > 0:
            needed = self._others - self.plane.departed()
            try:
                return self.plane.recv(rank, tag, min(remaining, _LOOK_FOR_ABORTS_EVERY), needed=needed)
            except PeerLostError as error:
                # Who left in good order has given all it had to give; only what we wait for itself is missed.
                if error.rank == rank or error.rank not in self.plane.departed():
                    raise
            except TransportTimeoutError:
                self._raise_if_aborted()
        raise TransportTimeoutError(f"{self._what}: {peer_name(rank)} did not take part within {self.timeout:g} s")

    def _raise_if_aborted(self) -> None:
        for rank in self._others:
            message = self.plane.poll(rank, self._abort_tag)
            if message is not None and len(message.header) >= _ABORT.size:
                kind, lost = _ABORT.unpack_from(message.header)
                reason = message.header[_ABORT.size :].decode(errors="replace")
                if kind == _PEER_LOST:
                    raise PeerLostError(lost, f"{reason} (seen by {peer_name(rank)})")
                raise TransportError(f"{self._what}: {peer_name(rank)} gave up: {reason}")
