"""Reads the copies that workers made for a checkpoint: piece by piece, beside the commands of the running job."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from distensor.core.errors import FrameError, WorkerFailedError
from distensor.program.calls import TORCH_DTYPES
from distensor.transport import Channel
from distensor.transport.driver import PIECE_BYTES, ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.training.checkpoint_manifest import TensorSpec
    from distensor.transport import DataPlane

ANSWER_SECONDS = 300.0
"""How long one piece may take; a worker that is busy answers between its operations."""

ROOM = 64
"""Bytes that one piece may take on the wire beyond its elements."""


class SnapshotReader:
    """Asks for one piece at a time, so that no more than that waits anywhere. For one thread at a time."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._asking = threading.Lock()
        self._requests: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)

    def read(self, rank: int, number: int, key: str, spec: TensorSpec) -> Tensor:
        """A whole tensor of the copy that `rank` made for snapshot `number`.

        Raises:
            PeerLostError, TransportTimeoutError: the worker is gone, or does not answer.
            WorkerFailedError: it sent something else.
        """
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        flat = tensor.view(-1)
        start = 0
        while start < flat.numel():
            piece = self._piece(rank, number, key, start, flat.dtype)
            if not 0 < piece.numel() <= flat.numel() - start:
                raise WorkerFailedError(f"rank {rank} sent {piece.numel()} elements of {key!r} from {start} on")
            flat.narrow(0, start, piece.numel()).copy_(piece)
            start += piece.numel()
        return tensor

    def drop(self, rank: int, number: int) -> None:
        """The copy is no longer needed."""
        self._ask(rank, {"number": number, "key": None})

    def _piece(self, rank: int, number: int, key: str, start: int, dtype: torch.dtype) -> Tensor:
        tensors = self._ask(rank, {"number": number, "key": key, "start": start})
        piece = tensors.get("piece")
        if piece is None or piece.dim() != 1 or piece.dtype is not dtype:
            raise WorkerFailedError(f"rank {rank} answered the request for {key!r} with something else than {dtype}")
        return piece

    def _ask(self, rank: int, meta: dict[str, Any]) -> dict[str, Tensor]:
        with self._asking:
            request = next(self._requests[rank])
            send_named(self._plane, rank, Channel.SNAPSHOT, request, meta, {})
            try:
                answer, tensors = receive_named(
                    self._plane, rank, Channel.SNAPSHOT, request, ANSWER_SECONDS, most=PIECE_BYTES + ROOM
                )
            except FrameError as error:
                raise WorkerFailedError(f"rank {rank}: {error}") from error
        if answer.get("code") != ReplyCode.OK:
            raise WorkerFailedError(f"rank {rank}: {str(answer.get('message'))[:500]}")
        return tensors
