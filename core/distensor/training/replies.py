"""What workers answer, checked before the trainer uses any of it: a worker is a process of somebody else."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from distensor.core import DRIVER_RANK
from distensor.core.errors import WorkerFailedError
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.core.warm_up import RankFigures
from distensor.training.results import RankMemory
from distensor.transport import PathKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Layout: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Tensors by name: dtype and shape."""

_LINK_FIGURES = ("rtt_ms", "rtt_age_s", "line_rate")
MAX_BYTES = 1 << 63
ALIGNMENT_ROOM = 16
"""Bytes that a tensor may take on the wire beyond its elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One rank's answer to one command. `who` names rank and node, for errors."""

    rank: int
    who: str
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossReply:
    """The mean loss over `weight` real elements; NaN where it is no finite number."""

    loss: float
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """Bytes that a rank has sent to a peer, and got from it, since the epoch began, and what it knows of the way to it.

    `rtt_ms` was measured `rtt_age_s` ago; `line_rate` is bytes a second of the newest large message from the peer.
    """

    peer: int
    sent: int
    received: int = 0
    path: str = ""
    rtt_ms: float | None = None
    rtt_age_s: float | None = None
    line_rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """What a rank noticed about replicas, by their numbers: left out, scaled down, pairs that sent the same."""

    dropped: tuple[int, ...] = ()
    clipped: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReply:
    """One rank's account of a step."""

    loss: float
    weight: float
    grad_norm: float
    committed: bool
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    links: tuple[LinkBytes, ...]
    figures: RankFigures | None
    memory: RankMemory
    noticed: Noticed = field(default_factory=Noticed)


def read_loss(reply: Reply) -> LossReply:
    """Raises WorkerFailedError naming the rank and the field that is wrong."""
    return LossReply(loss=_number_or_nan(reply, "loss"), weight=_amount(reply, "weight"))


def read_step(reply: Reply, ranks: Collection[int]) -> StepReply:
    """Raises WorkerFailedError naming the rank and the field that is wrong."""
    answer = StepReply(
        loss=_number_or_nan(reply, "loss"),
        weight=_amount(reply, "weight"),
        grad_norm=_number_or_nan(reply, "grad_norm"),
        committed=_flag(reply, "committed"),
        compute_seconds=_amount(reply, "compute_seconds"),
        sync_seconds=_amount(reply, "sync_seconds"),
        wait_seconds=_amount(reply, "wait_seconds"),
        links=_links(reply, ranks),
        figures=_figures(reply),
        memory=_memory(reply),
        noticed=_noticed(reply, len(ranks)),
    )
    if answer.committed and not (answer.weight > 0 and math.isfinite(answer.loss) and math.isfinite(answer.grad_norm)):
        raise WorkerFailedError(
            f"{reply.who} says that it has applied an update with loss {answer.loss}, gradient norm "
            f"{answer.grad_norm} and {answer.weight:g} elements; an update needs numbers and at least one element"
        )
    return answer


def agreed(replies: Sequence[Reply], name: str, values: Sequence[Any]) -> Any:
    """The value that all ranks report.

    Raises:
        WorkerFailedError: two ranks report different ones.
    """
    for reply, value in zip(replies, values, strict=True):
        if repr(value) != repr(values[0]):  # by text, so that NaN agrees with NaN
            raise WorkerFailedError(
                f"{reply.who} reports {name} {value}, {replies[0].who} {values[0]}; all ranks hold the same sum"
            )
    return values[0]


def check_tensors(reply: Reply, expected: Layout) -> None:
    """Raises WorkerFailedError unless the reply holds exactly the tensors that its programs declare."""
    missing, unknown = sorted(expected.keys() - reply.tensors.keys()), sorted(reply.tensors.keys() - expected.keys())
    if missing or unknown:
        raise WorkerFailedError(f"{reply.who} left out {missing[:5]} and sent {[name[:100] for name in unknown[:5]]}")
    for name, (dtype, shape) in expected.items():
        tensor = reply.tensors[name]
        if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
            raise WorkerFailedError(
                f"{reply.who} sent {name!r} as {tensor.dtype} {tuple(tensor.shape)}; it is {dtype} {shape}"
            )


def layout_bytes(layout: Layout) -> int:
    """The most that these tensors may take on the wire."""
    return sum(math.prod(shape) * dtype.itemsize + ALIGNMENT_ROOM for dtype, shape in layout.values())


def _wrong(reply: Reply, key: str, value: object, expected: str) -> NoReturn:
    raise WorkerFailedError(f"{reply.who} answered {key}={str(value)[:100]!r}; expected {expected}")


def _amount(reply: Reply, key: str) -> float:
    value = reply.meta.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < MAX_BYTES:
        _wrong(reply, key, value, "a finite number of at least 0")
    return float(value)


def _number_or_nan(reply: Reply, key: str) -> float:
    """JSON has no NaN: null says 'not a number', and a field that is missing says nothing at all."""
    value = reply.meta.get(key, "nothing")
    if value is None:
        return math.nan
    if not isinstance(value, float) or not math.isfinite(value):
        _wrong(reply, key, value, "a finite number, or null")
    return value


def _flag(reply: Reply, key: str) -> bool:
    value = reply.meta.get(key)
    if not isinstance(value, bool):
        _wrong(reply, key, value, "true or false")
    return value


def _figures(reply: Reply) -> RankFigures | None:
    found = reply.meta.get("figures")
    if found is None:
        return None
    if not isinstance(found, dict):
        _wrong(reply, "figures", found, "an object, or null")
    inner = replace(reply, meta=found)
    return RankFigures(
        forward=_amount(inner, "forward"),
        backward=_amount(inner, "backward"),
        before=_link_seconds(inner, "before"),
        after=_link_seconds(inner, "after"),
        most_in_flight=None if found.get("most_in_flight") is None else int(_amount(inner, "most_in_flight")),
    )


def _link_seconds(reply: Reply, key: str) -> LinkSeconds | None:
    found = reply.meta.get(key)
    if found is None:
        return None
    if not isinstance(found, dict):
        _wrong(reply, key, found, "an object, or null")
    inner = replace(reply, meta=found)
    return LinkSeconds(latency=_amount(inner, "latency"), occupied=_amount(inner, "occupied"))


def _links(reply: Reply, ranks: Collection[int]) -> tuple[LinkBytes, ...]:
    peers = {int(DRIVER_RANK), *ranks} - {reply.rank}
    found = reply.meta.get("links")
    if not isinstance(found, list) or len(found) > len(peers):
        _wrong(reply, "links", found, f"at most {len(peers)} objects")
    return tuple(_link(reply, item, peers.__contains__) for item in found)


def _noticed(reply: Reply, most: int) -> Noticed:
    """Nothing said is nothing noticed. `most` is the number of ranks; there are no more replicas."""
    found = reply.meta.get("noticed")
    if found is None:
        return Noticed()
    known: dict[str, Any] = found if isinstance(found, dict) else {}
    lists = {key: known.get(key) for key in ("dropped", "clipped", "copies")}
    if not all(isinstance(value, list) and len(value) <= most * most for value in lists.values()):
        _wrong(reply, "noticed", found, "lists of replicas")
    copies = [pair for pair in known["copies"] if isinstance(pair, list) and len(pair) == 2]
    numbers = [*known["dropped"], *known["clipped"], *(number for pair in copies for number in pair)]
    if len(copies) < len(known["copies"]) or not all(type(n) is int and 0 <= n < most for n in numbers):
        _wrong(reply, "noticed", found, "numbers of replicas")
    return Noticed(
        dropped=tuple(known["dropped"]), clipped=tuple(known["clipped"]), copies=tuple((a, b) for a, b in copies)
    )


def _memory(reply: Reply) -> RankMemory:
    found = reply.meta.get("memory")
    named: dict[str, Any] = found if isinstance(found, dict) else {}
    values = [value for key in ("weights", "optimizer", "peak") if type(value := named.get(key)) is int]
    if len(values) != 3 or not all(0 <= value < MAX_BYTES for value in values):
        _wrong(reply, "memory", found, "bytes of weights, of optimizer and at the peak")
    weights, optimizer, peak = values
    return RankMemory(weights=weights, optimizer=optimizer, peak=peak)


def _link(reply: Reply, item: object, is_peer: Callable[[object], bool]) -> LinkBytes:
    peer, sent = (item.get("peer"), item.get("sent")) if isinstance(item, dict) else (None, None)
    if type(peer) is not int or not is_peer(peer) or type(sent) is not int or not 0 <= sent < MAX_BYTES:
        _wrong(reply, "links", item, "a peer of this job and the bytes sent to it")
    inner = replace(reply, meta=item if isinstance(item, dict) else {})
    path = inner.meta.get("path") or ""
    if path not in ("", *PathKind):
        _wrong(reply, "path", path, f"one of {', '.join(PathKind)}")
    received = inner.meta.get("received", 0)
    if type(received) is not int or not 0 <= received < MAX_BYTES:
        _wrong(reply, "links", item, "the bytes that came from the peer")
    figures = {key: None if inner.meta.get(key) is None else _amount(inner, key) for key in _LINK_FIGURES}
    return LinkBytes(peer=peer, sent=sent, received=received, path=str(path), **figures)
