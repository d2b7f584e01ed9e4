"""A mutation fuzzer for decoders: whatever the bytes, they return or refuse in the words of this package, soon.

A decoder is told by valid examples. Each input is one of them, damaged a few times: in its bytes, or, where it is JSON,
in its tree. The same seed gives the same inputs, so a crash is repeated by its seed.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distensor.core.errors import DistensorError
from distensor.core.reading import Reading, Unavailable

MOST_BYTES = 1 << 20
"""Longer inputs than this are cut."""
_ROOM_BYTES = 512 << 20
_STATM = Path("/proc/self/statm")

_NUMBERS: tuple[int, ...] = (
    *(0, 1, -1, 2, 7, 63, 64, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1),
    *(2**63, 2**64 - 1, -(2**31), -(2**63), 10**30),
)
_TOKENS = (
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"NaN", b"Infinity", b"-0", b"1e999", b"1e-999"),
    *(b"\\", b"\\ud800", b"\xff", b"\x00", b"\n", b"..", b"/", b"%", b"=", b"-----", b"://", b"\xe2\x80\xae"),
    *(b"9" * 5000, b"[" * 5000, b'{"a":' * 3000),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "\x1b[31m", "a" * 3000, [], {}, [None], {"": None}, [[]] * 50, 0.5, -0.0),
    *(1e308, 5e-324, float("inf"), float("nan"), 10**400, -(10**400), *_NUMBERS),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """What takes bytes of another machine apart.

    Args:
        name: "module:function" of what `decode` calls.
        decode: takes any bytes; what it returns is of no interest.
        seeds: valid examples; `decode` takes each without an error.
        refuses: the errors by which it may say no.
        cost: how much more one input costs than the usual one; with 10, a tenth of the inputs are tried.
    """

    name: str
    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (DistensorError,)
    cost: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """An input by which a decoder broke its promise."""

    decoder: str
    data: bytes
    why: str

    def __str__(self) -> str:
        return f"{self.decoder} on {self.data[:200]!r} ({len(self.data)} bytes): {self.why}"


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    """CPU seconds of one input."""
    crashes: list[Crash] = field(default_factory=list)


def fuzz(
    decoder: Decoder, *, seed: int, inputs: int, cpu: Callable[[], float], seconds: float = 2.0, most_crashes: int = 3
) -> Outcome:
    """Try damaged inputs, a tenth of them if each costs ten times as much, and stop after a few crashes.

    Args:
        cpu: CPU seconds of this thread (`time.thread_time`).
        seconds: of CPU that one input may take.
    """
    chance = random.Random(f"{seed} {decoder.name}")  # noqa: S311 - which inputs are tried is no secret
    outcome = Outcome()
    with bounded_memory():
        for _ in range(max(1, inputs // decoder.cost)):
            _try(decoder, damaged(chance, decoder.seeds), cpu, seconds, outcome)
            if len(outcome.crashes) >= most_crashes:
                break
    return outcome


def _try(decoder: Decoder, data: bytes, cpu: Callable[[], float], seconds: float, outcome: Outcome) -> None:
    outcome.inputs += 1
    why, began = "", cpu()
    try:
        decoder.decode(data)
    except decoder.refuses:
        outcome.refused += 1
    except Exception as error:  # noqa: BLE001 - to find any error but those that were promised is what this is for
        why = "".join(traceback.format_exception(error)[-3:])
    took = cpu() - began
    outcome.slowest = max(outcome.slowest, took)
    if took > seconds:
        why = f"it took {took:.1f} s of CPU, the limit is {seconds:g}. {why}"
    if why:
        outcome.crashes.append(Crash(decoder=decoder.name, data=data, why=why))


@contextmanager
def bounded_memory(room: int = _ROOM_BYTES) -> Iterator[Reading[int]]:
    """Until the end of the block, this process may take `room` bytes more: then MemoryError. Yields the limit."""
    import resource

    if not _STATM.exists():
        yield Unavailable(reason="only Linux says how large a process is")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(_STATM.read_text().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- damage ----------------------------------------------------------------------------------------------------------


def damaged(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the examples after some accidents."""
    data = chance.choice(seeds)
    if chance.random() < 0.5 and (tree := _tree(data)) is not None:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            tree = _damaged_tree(chance, tree)
        data = _json(tree)
        if chance.random() < 0.8:
            return data[:MOST_BYTES]
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        data = chance.choice(_ACCIDENTS)(chance, data, seeds)[:MOST_BYTES]
    return data


def _tree(data: bytes) -> Any:
    """None for what is no JSON, which as a tree is of no interest either."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _json(tree: Any) -> bytes:
    try:
        return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # whole numbers of more digits than Python writes
        return b"1" + b"0" * 5000


def _damaged_tree(chance: random.Random, tree: Any) -> Any:
    """Replace, remove, repeat or wrap something at a random place."""
    if isinstance(tree, dict) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree))
        rest = dict(tree)
        match chance.randrange(8):
            case 0:
                del rest[key]
            case 1:
                rest[chance.choice((key + "x", "", "type", "v", key.upper()))] = rest[key]
            case 2:
                other = chance.choice(list(tree))
                rest[key], rest[other] = rest[other], rest[key]
            case _:
                rest[key] = _damaged_tree(chance, rest[key])
        return rest
    if isinstance(tree, list) and tree and chance.random() < 0.85:
        place, items = chance.randrange(len(tree)), list(tree)
        match chance.randrange(8):
            case 0:
                del items[place]
            case 1:
                items[place:place] = [items[place]] * chance.choice((1, 2, 300))
            case _:
                items[place] = _damaged_tree(chance, items[place])
        return items
    return _another_value(chance, tree)


def _another_value(chance: random.Random, old: Any) -> Any:
    match chance.randrange(5):
        case 0 if isinstance(old, int | float) and not isinstance(old, bool):
            return old + chance.choice((-1, 1)) if chance.random() < 0.5 else -old
        case 1 if isinstance(old, str) and old:
            place = chance.randrange(len(old))
            return old[:place] + chance.choice(("", "\x00", "é", "/", old)) + old[place + 1 :]
        case 2:
            return [old]
        case 3:
            return {"value": old}
        case _:
            return chance.choice(_VALUES)


def _flip(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x80"
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def _overwrite(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    size = chance.choice((1, 2, 4, 8))
    number = (chance.choice(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, chance.choice(("big", "little")))
    return data[:place] + number + data[place + size :]


def _insert(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    text = str(chance.choice(_NUMBERS)).encode() if chance.random() < 0.3 else chance.choice(_TOKENS)
    return data[:place] + text + data[place + chance.choice((0, 0, 1, len(text))) :]


def _remove(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[place + chance.choice((1, 1, 2, 8, 64)) :]


def _truncate(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _repeat(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first, last = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    times = min(chance.choice((1, 2, 100)), MOST_BYTES // (last - first + 1))
    return data[:last] + data[first:last] * times + data[last:]


def _splice(chance: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = chance.choice(seeds)
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _noise(chance: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.choice((1, 4, 16, 200)))


_ACCIDENTS = (_flip, _flip, _overwrite, _overwrite, _insert, _remove, _truncate, _repeat, _splice, _noise)
