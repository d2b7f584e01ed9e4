"""Ranks that take part in steps before all weights have come to them: who they are, and what they ask others for.

They get rows of a batch once nothing is missing. Until then they add nothing to any sum, and train nothing; see
`node/filling.py` for their side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distensor.core.errors import WorkerFailedError
from distensor.training.replies import Reply
from distensor.transport.driver import Command


class Asking(Protocol):
    """What is needed of `JobConnection`."""

    def command(
        self,
        command: Command,
        meta: Mapping[str, Any],
        tensors: None = None,
        extra: Mapping[int, Mapping[str, Any]] | None = None,
        most_bytes: None = None,
        only: Collection[int] | None = None,
    ) -> list[Reply]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinReply:
    """How many weights a joiner still lacks, and what it asks its sources to copy now, by rank."""

    left: int
    number: int
    wanted: Mapping[int, list[str]]


class Joining:
    """Of one epoch.

    Args:
        sources: for each rank that lacks weights, the ranks that have them.
    """

    def __init__(self, sources: Mapping[int, Sequence[int]]) -> None:
        self._sources = dict(sources)

    @property
    def ranks(self) -> Collection[int]:
        """Those that lack something."""
        return self._sources.keys()

    def advance(self, connection: Asking) -> None:
        """Between two steps: hear what has come, and have what is asked for copied.

        Raises:
            WorkerFailedError: an answer that is none.
            WorkerLostError: a rank was lost.
        """
        orders = {rank: {"sources": list(sources)} for rank, sources in self._sources.items()}
        offers: dict[int, list[dict[str, Any]]] = {}
        for reply in connection.command(Command.JOIN, {}, extra=orders, only=orders.keys()):
            answer = read_join(reply, self._sources[reply.rank])
            if not answer.left:
                del self._sources[reply.rank]
            for source, keys in answer.wanted.items():
                offer = {"joiner": reply.rank, "number": answer.number, "wanted": keys}
                offers.setdefault(source, []).append(offer)
        if offers:
            extra = {source: {"offers": own} for source, own in offers.items()}
            connection.command(Command.JOIN, {}, extra=extra, only=extra.keys())


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def read_join(reply: Reply, sources: Collection[int]) -> JoinReply:
    """Raises WorkerFailedError naming the rank."""
    left, number = (reply.meta.get(key) for key in ("left", "number"))
    wanted: Any = reply.meta.get("wanted")
    known = {str(source): source for source in sources}
    good = all(type(value) is int and value >= 0 for value in (left, number)) and isinstance(wanted, dict)
    if not good or not all(key in known and _is_names(keys) for key, keys in wanted.items()):
        raise WorkerFailedError(f"{reply.who} answered a join with {str(dict(reply.meta))[:200]}")
    return JoinReply(
        left=int(left or 0), number=int(number or 0), wanted={known[key]: keys for key, keys in wanted.items()}
    )
