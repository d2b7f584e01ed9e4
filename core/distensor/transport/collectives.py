"""Collectives between the members of a group, over direct connections.

Everybody reaches everybody, so nothing is passed on: an all-reduce is two hops (each member reduces its share of the
elements and hands the result round) at 2(n-1)/n of the bytes, the least possible; small ones and those of two members
are one hop. Results are bit-equal on every member.

All tensors here are flat, contiguous and on the CPU. Large ones travel in segments, so that reducing and sending
overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from distensor.transport.exchange import Exchange
from distensor.transport.reduction import Reduction, check_reducible, reduce_into

SEGMENT_BYTES = 1 << 20
_ONE_HOP_BELOW = 1 << 14


def all_reduce(exchange: Exchange, data: Tensor, op: Reduction) -> None:
    check_reducible(data.dtype, op)
    _begin(exchange, f"all_reduce {op}", data)
    if exchange.size <= 2 or data.numel() * data.element_size() <= _ONE_HOP_BELOW:
        _all_reduce_one_hop(exchange, data, op)
    else:
        _all_reduce_two_hops(exchange, data, op)
    exchange.finish()


def _all_reduce_one_hop(exchange: Exchange, data: Tensor, op: Reduction) -> None:
    segments = list(_segments(data))
    handles = [
        [exchange.send(peer, index, segment) for peer in exchange.peers] for index, segment in enumerate(segments)
    ]
    for index, segment in enumerate(segments):
        parts = [
            segment if member == exchange.me else exchange.receive(member, index, segment)
            for member in range(exchange.size)
        ]
        for handle in handles[index]:
            handle.wait()
        reduce_into(segment, parts, op, exchange.size)


def _all_reduce_two_hops(exchange: Exchange, data: Tensor, op: Reduction) -> None:
    shares = _shares(data, exchange.size)
    rounds = max(len(share) for share in shares)
    for index in range(rounds):
        for peer in exchange.peers:
            if index < len(shares[peer]):
                exchange.send(peer, 2 * index, shares[peer][index])
    own = shares[exchange.me]
    for index, segment in enumerate(own):
        _reduce_received(exchange, segment, 2 * index, op)
        for peer in exchange.peers:
            exchange.send(peer, 2 * index + 1, segment)
    for index in range(rounds):
        for peer in exchange.peers:
            if index < len(shares[peer]):
                # It has reduced what we sent of this segment, so those bytes have left: the memory may change.
                shares[peer][index].copy_(exchange.receive(peer, 2 * index + 1, shares[peer][index]))


def _reduce_received(exchange: Exchange, own: Tensor, part: int, op: Reduction) -> None:
    parts = (own if member == exchange.me else exchange.receive(member, part, own) for member in range(exchange.size))
    reduce_into(own, parts, op, exchange.size)


def reduce_scatter(exchange: Exchange, out: Tensor, pieces: Sequence[Tensor], op: Reduction) -> None:
    """Member i gets the reduction of everybody's `pieces[i]` in `out`."""
    check_reducible(out.dtype, op)
    exchange.begin("reduce_scatter", f"reduce_scatter {op} {out.dtype} {[piece.numel() for piece in pieces]}")
    for peer in exchange.peers:
        for index, segment in enumerate(_segments(pieces[peer])):
            exchange.send(peer, index, segment)
    own = pieces[exchange.me]
    for index, (target, segment) in enumerate(zip(_segments(out), _segments(own), strict=True)):
        parts = (
            segment if member == exchange.me else exchange.receive(member, index, segment)
            for member in range(exchange.size)
        )
        reduce_into(target, parts, op, exchange.size)
    exchange.finish()


def all_gather(exchange: Exchange, outs: Sequence[Tensor], data: Tensor) -> None:
    """Everybody gets member i's `data` in `outs[i]`; the sizes may differ."""
    exchange.begin("all_gather", f"all_gather {data.dtype}")
    _send_all(exchange, exchange.peers, data)
    outs[exchange.me].copy_(data)
    for peer in exchange.peers:
        _receive_all(exchange, peer, outs[peer])
    exchange.finish()


def all_to_all(exchange: Exchange, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    """Member i's `pieces[j]` becomes member j's `outs[i]`."""
    exchange.begin("all_to_all", f"all_to_all {outs[exchange.me].dtype}")
    for peer in exchange.peers:
        _send_all(exchange, [peer], pieces[peer])
    outs[exchange.me].copy_(pieces[exchange.me])
    for peer in exchange.peers:
        _receive_all(exchange, peer, outs[peer])
    exchange.finish()


def broadcast(exchange: Exchange, data: Tensor, root: int) -> None:
    _begin(exchange, f"broadcast from {root}", data)
    if exchange.me == root:
        _send_all(exchange, exchange.peers, data)
    else:
        _receive_all(exchange, root, data)
    exchange.finish()


def reduce(exchange: Exchange, data: Tensor, op: Reduction, root: int) -> None:
    """The root gets the reduction; the others keep what they have."""
    check_reducible(data.dtype, op)
    _begin(exchange, f"reduce {op} to {root}", data)
    if exchange.me != root:
        _send_all(exchange, [root], data)
    else:
        for index, segment in enumerate(_segments(data)):
            _reduce_received(exchange, segment, index, op)
    exchange.finish()


def gather(exchange: Exchange, outs: Sequence[Tensor], data: Tensor, root: int) -> None:
    exchange.begin("gather", f"gather to {root} {data.dtype}")
    if exchange.me != root:
        _send_all(exchange, [root], data)
    else:
        outs[root].copy_(data)
        for peer in exchange.peers:
            _receive_all(exchange, peer, outs[peer])
    exchange.finish()


def scatter(exchange: Exchange, out: Tensor, pieces: Sequence[Tensor], root: int) -> None:
    exchange.begin("scatter", f"scatter from {root} {out.dtype}")
    if exchange.me != root:
        _receive_all(exchange, root, out)
    else:
        for peer in exchange.peers:
            _send_all(exchange, [peer], pieces[peer])
        out.copy_(pieces[root])
    exchange.finish()


def barrier(exchange: Exchange) -> None:
    """Nobody returns before everybody has come."""
    exchange.begin("barrier", "barrier")
    for peer in exchange.peers:
        exchange.send(peer, 0)
    for peer in exchange.peers:
        exchange.receive(peer, 0)
    exchange.finish()


def _begin(exchange: Exchange, what: str, data: Tensor) -> None:
    exchange.begin(what, f"{what} {data.dtype} {data.numel()}")


def _send_all(exchange: Exchange, peers: Sequence[int], data: Tensor) -> None:
    for index, segment in enumerate(_segments(data)):
        for peer in peers:
            exchange.send(peer, index, segment)


def _receive_all(exchange: Exchange, peer: int, out: Tensor) -> None:
    for index, segment in enumerate(_segments(out)):
        segment.copy_(exchange.receive(peer, index, segment))


def _segments(data: Tensor) -> Iterator[Tensor]:
    """Pieces of at most SEGMENT_BYTES; always at least one, so that an empty tensor is a message too."""
    length = max(1, SEGMENT_BYTES // data.element_size())
    yield data if data.numel() <= length else data[:length]
    for start in range(length, data.numel(), length):
        yield data[start : start + length]


def _shares(data: Tensor, members: int) -> list[list[Tensor]]:
    """Each member's part of the elements, in segments; the first ones get one element more where it does not divide."""
    return [list(_segments(share)) for share in torch.tensor_split(data, members)]
