"""Single messages between members of a group: send and receive with torch's tags."""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import Tensor

from distensor.core.errors import TransportError
from distensor.transport.flat import Target, flat_source
from distensor.transport.plane import DataPlane
from distensor.transport.tensors import tensor_bytes
from distensor.transport.types import Channel, Tag, peer_name
from distensor.transport.works import MessageWork


class Messenger:
    """Numbers the messages to and from each member, so that receives may be waited for in any order."""

    def __init__(self, plane: DataPlane, ranks: tuple[int, ...], slot: int, timeout: float) -> None:
        self._plane = plane
        self._ranks = ranks
        self._slot = slot
        self._timeout = timeout
        self._lock = threading.Lock()
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()

    def _next(self, counter: Counter[tuple[int, int]], member: int, tag: int) -> Tag:
        with self._lock:
            counter[member, tag] += 1
            return Tag(Channel.P2P, step=counter[member, tag], micro=tag, slot=self._slot)

    def send(self, tensor: Tensor, member: int, tag: int) -> MessageWork:
        data = flat_source(tensor)
        peer = self._ranks[member]
        self._plane.check(peer)
        handle = self._plane.send(peer, self._next(self._sent, member, tag), _kind(tensor), [tensor_bytes(data)])

        def run(timeout: float | None) -> None:
            handle.wait(self._timeout if timeout is None else timeout)

        return MessageWork(run, lambda: handle.done)

    def receive(self, tensor: Tensor, member: int, tag: int) -> MessageWork:
        peer, wire_tag = self._ranks[member], self._next(self._received, member, tag)

        def run(timeout: float | None) -> None:
            message = self._plane.recv(peer, wire_tag, self._timeout if timeout is None else timeout)
            if message.header != _kind(tensor):
                raise TransportError(
                    f"recv from {peer_name(peer)} with tag {tag} got {message.header.decode(errors='replace')!r}; "
                    f"the tensor to fill is {_kind(tensor).decode()!r}"
                )
            with torch.no_grad():
                _fill(tensor, message.body)

        return MessageWork(run, lambda: self._plane.has(peer, wire_tag), source=member)


def _kind(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tensor.numel()}".encode()


def _fill(tensor: Tensor, body: bytes | bytearray | memoryview) -> None:
    if tensor.numel():
        target = Target(tensor, load=False)
        target.flat.copy_(torch.frombuffer(body, dtype=torch.uint8).view(tensor.dtype))
        target.store()
