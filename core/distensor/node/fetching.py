"""How weights travel from ranks that hold them to one that does not, beside the steps: a copy of some at a time.

The source copies what was asked for between two steps, and a thread of its own hands the copy out piece by piece, as it
does to the driver for a checkpoint. The joiner has a thread for each source, which asks for one piece after the other
and rests as long as each took: no more than half of what the link gives goes into the copy.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.core import Clock
from distensor.core.errors import ConfigError, DistensorError, FrameError, ProgramRejectedError
from distensor.node.snapshots import STATE, SnapshotServer, hash_of
from distensor.transport import Channel
from distensor.transport.driver import ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.transport import DataPlane

logger = logging.getLogger(__name__)


class Givers:
    """On a source: the copies that joiners ask for, one for each of them, in one epoch."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._servers: dict[int, SnapshotServer] = {}

    def offer(self, engine: ShardEngine, joiner: int, number: int, keys: Sequence[str]) -> None:
        """Copy the weights `keys` and their optimizer's state for `joiner`; an earlier copy for it is given up.

        Raises:
            ProgramRejectedError: one that is not here.
        """
        weights, state = engine.everything_of(keys)
        fields = {f"{STATE}{key}/{name}": value for key, own in state.items() for name, value in own.items()}
        self._servers.setdefault(joiner, SnapshotServer(self._plane, joiner)).take(number, weights | fields)


@dataclass(kw_only=True, slots=True)
class _Fetch:
    """Some weights from one source."""

    source: int
    number: int
    keys: Sequence[str]
    sizes: Mapping[str, Mapping[str, int]]
    """Of each weight: the most elements that it (under "") and each field of its state may have."""
    came: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By weight: itself under "", and the fields of its state."""
    error: DistensorError | None = None
    thread: threading.Thread | None = None


class Fetcher:
    """On a joiner: what is on its way to it, in one epoch. Whoever sends what cannot be is not asked again in it."""

    def __init__(self, plane: DataPlane, clock: Clock) -> None:
        self._plane = plane
        self._clock = clock
        self._number = 0
        self._refused: dict[int, DistensorError] = {}
        self._requests: dict[int, int] = {}
        self._under_way: list[_Fetch] = []

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def order(self, engine: ShardEngine, sources: Sequence[int]) -> tuple[int, dict[int, list[str]]]:
        """Choose what to ask for. The copies are made after this, so nothing is asked for before `begin`.

        Returns:
            A number for the copies, and what each source is to copy.

        Raises:
            FrameError, ProgramRejectedError, ConfigError: none of the sources has sent what was asked for.
        """
        filling = engine.filling
        assert filling is not None, "something is missing"
        good = [source for source in sources if source not in self._refused]
        if not good:
            raise self._refused[sources[-1]]
        self._number += 1
        wanted = filling.order(good, in_time=self._number > 1)
        self._under_way = [
            _Fetch(source=source, number=self._number, keys=keys, sizes={key: engine.sizes_of(key) for key in keys})
            for source, keys in wanted.items()
        ]
        return self._number, wanted

    def begin(self) -> None:
        """The copies have been made."""
        for fetch in self._under_way:
            if fetch.thread is None:
                name = f"fetch-from-{fetch.source}"
                fetch.thread = threading.Thread(target=self._run, args=(fetch,), name=name, daemon=True)
                fetch.thread.start()

    def admit(self, engine: ShardEngine) -> None:
        """Take over what is complete, between two steps.

        What is not what was asked for is asked of the others.

        Raises:
            PeerLostError: a source is gone.
        """
        filling = engine.filling
        for fetch in list(self._under_way):
            if fetch.thread is None or fetch.thread.is_alive():
                continue
            self._under_way.remove(fetch)
            try:
                if fetch.error is not None:
                    raise fetch.error
                for key in fetch.keys:
                    fields = fetch.came.pop(key)
                    engine.fill(key, fields.pop(""), fields)
            except (FrameError, ProgramRejectedError, ConfigError) as error:
                logger.warning("%s; its weights are asked of others", error)
                self._refused[fetch.source] = error
                if filling is not None:
                    filling.give_up(fetch.keys)

    def _run(self, fetch: _Fetch) -> None:
        try:
            for key in fetch.keys:
                found = {name: self._tensor(fetch, key, name, most) for name, most in fetch.sizes[key].items()}
                fetch.came[key] = {name: tensor for name, tensor in found.items() if tensor is not None}
        except DistensorError as error:
            fetch.error = error

    def _tensor(self, fetch: _Fetch, key: str, field_name: str, most: int) -> Tensor | None:
        """None where the source has none: a weight that was never updated has no state."""
        import torch

        name = f"{STATE}{key}/{field_name}" if field_name else key
        pieces: list[Tensor] = []
        head = self._ask(fetch, name, 0, pieces)
        if not pieces:
            if not field_name:
                raise FrameError(f"rank {fetch.source} does not hold {name[:100]!r}")
            return None
        shape = head.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise FrameError(f"rank {fetch.source} sent {name[:100]!r} without its shape")
        size, start = math.prod(shape), pieces[0].numel()
        while start < size <= most and pieces[-1].numel():
            self._ask(fetch, name, start, pieces)
            start += pieces[-1].numel()
        if not start == size <= most or len({piece.dtype for piece in pieces}) != 1:
            text = f"rank {fetch.source} sent {start} elements of {name[:100]!r}, of shape {str(shape)[:100]}"
            raise FrameError(f"{text}; expected at most {most}, of one dtype")
        tensor = torch.cat(pieces).view(shape)
        if hash_of(tensor) != head.get("hash"):
            raise FrameError(f"rank {fetch.source} sent {name[:100]!r}, and it is not what its hash says")
        return tensor

    def _ask(self, fetch: _Fetch, name: str, start: int, pieces: list[Tensor]) -> Mapping[str, Any]:
        request = self._requests.get(fetch.source, 0)
        self._requests[fetch.source] = request + 1
        asked = self._clock.monotonic()
        words = {"number": fetch.number, "key": name, "start": start, "describe": start == 0}
        send_named(self._plane, fetch.source, Channel.SNAPSHOT, request, words, {})
        head, tensors = receive_named(self._plane, fetch.source, Channel.SNAPSHOT, request, None)
        if head.get("absent") is True and not tensors:
            return head
        if head.get("code") != ReplyCode.OK or tensors.keys() != {"piece"}:
            raise FrameError(f"rank {fetch.source} was asked for {name[:100]!r}: {str(head.get('message'))[:200]}")
        pieces.append(tensors["piece"].view(-1))
        self._clock.sleep(self._clock.monotonic() - asked)
        return head
