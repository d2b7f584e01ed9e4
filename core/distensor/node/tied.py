"""Gradients of a weight that several stages hold: every holder ends with the same sum, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from distensor.core.errors import FrameError
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.tensors import decode, encode

if TYPE_CHECKING:
    from torch import Tensor


def sum_tied_gradients(
    *,
    plane: DataPlane,
    rank: int,
    sequence: int,
    index: int,
    holders: Sequence[tuple[int, int, str]],
    weights: Mapping[str, Tensor],
) -> None:
    """Exchange and add the gradients of one tied weight.

    `holders` lists (stage, rank, name in that stage) in one order for all, `weights` this rank's by "stage/name", with
    their gradients: whole weights, or equal parts of them on all holders. The sum is taken in that order, so that
    all copies get the same bits and stay equal under the same optimizer. Ranks without a copy do nothing.
    """
    mine = {
        position: weights[f"{stage}/{name}"] for position, (stage, owner, name) in enumerate(holders) if owner == rank
    }
    if not mine or not next(iter(mine.values())).requires_grad:
        return
    own = {position: _gradient(parameter) for position, parameter in mine.items()}
    sends = []
    for position, gradient in own.items():
        for peer in sorted({owner for _, owner, _ in holders} - {rank}):
            header, buffers = encode([gradient])
            tag = Tag(channel=Channel.TIED, step=sequence, micro=index, slot=position)
            sends.append(plane.send(peer, tag, header, buffers))
    total: Tensor | None = None
    for position, (_, owner, _) in enumerate(holders):
        part = own[position] if owner == rank else _receive(plane, owner, sequence, index, position, own)
        total = part.clone() if total is None else total.add_(part)
    for handle in sends:
        handle.wait(None)
    for parameter in mine.values():
        parameter.grad = total.clone() if total is not None else None


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _receive(
    plane: DataPlane, owner: int, sequence: int, index: int, position: int, own: Mapping[int, Tensor]
) -> Tensor:
    tag = Tag(channel=Channel.TIED, step=sequence, micro=index, slot=position)
    reference = next(iter(own.values()))
    received = decode(plane.recv(owner, tag, None))
    if [(t.shape, t.dtype) for t in received] != [(reference.shape, reference.dtype)]:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in received[:3]) or "nothing"
        raise FrameError(
            f"rank {owner} sent {shapes} for {tag}; the tied weight is {tuple(reference.shape)} {reference.dtype}"
        )
    return received[0].detach().to(reference.device)
