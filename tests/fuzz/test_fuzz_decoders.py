"""Whatever arrives, each decoder returns or refuses in our own words, within bounded time and memory."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import decoders_control
import decoders_data
import decoders_local
import pytest
from foreign_readers import TRIED

from distensor.core.errors import FrameError
from distensor.core.reading import Unavailable
from distensor.testing.fuzzing import MOST_BYTES, Crash, Decoder, bounded_memory, damaged, fuzz

PARTS: Mapping[str, Any] = {"control": decoders_control, "data": decoders_data, "local": decoders_local}
INPUTS = 240
SOAK_INPUTS = int(os.environ.get("DISTENSOR_FUZZ_INPUTS", "100000"))
SEED = int(os.environ.get("DISTENSOR_FUZZ_SEED", "1"))


pytestmark = pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
"""Certificates with strange serial numbers still load, and are refused for what else is wrong with them."""

Registry = Mapping[str, Sequence[Decoder]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return {name: part.decoders(tmp_path_factory.mktemp(name)) for name, part in PARTS.items()}


@pytest.mark.parametrize("part", PARTS)
def test_every_decoder_returns_or_refuses(part: str, registry: Registry) -> None:
    assert run(part, registry[part], INPUTS) > 10 * INPUTS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_every_decoder_returns_or_refuses_for_long(part: str, registry: Registry) -> None:
    """DISTENSOR_FUZZ_INPUTS and DISTENSOR_FUZZ_SEED say how many for each, and which."""
    run(part, registry[part], SOAK_INPUTS)


def run(part: str, decoders: Sequence[Decoder], inputs: int) -> int:
    """Tries all decoders of a part; how many inputs that were. Prints a line for each."""
    tried, crashes, slowest = 0, list[Crash](), 0.0
    for decoder in decoders:
        for seed in decoder.seeds:
            decoder.decode(seed)
        found = fuzz(decoder, seed=SEED, inputs=inputs, cpu=time.thread_time)
        print(
            f"{decoder.name:58} {found.inputs:8} tried {found.refused:8} refused {found.slowest * 1e3:8.1f} ms at most"
        )
        tried, slowest = tried + found.inputs, max(slowest, found.slowest)
        crashes += found.crashes
    print(f"{part}: {tried} inputs, {len(crashes)} crashes, the slowest took {slowest * 1e3:.1f} ms of CPU")
    assert not crashes, "\n\n".join(map(str, crashes))
    return tried


class Bomb:
    """What makes a directory where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def with_bombs(seed: bytes, bomb: bytes) -> Iterator[bytes]:
    """The bomb alone, before, behind and within the example, and in place of each text of its JSON."""
    yield from (bomb, bomb + seed, seed + bomb, seed[: len(seed) // 2] + bomb + seed[len(seed) // 2 :])
    try:
        tree = json.loads(seed)
    except ValueError:
        return
    for text in (bomb.decode("latin-1"), base64.b64encode(bomb).decode(), bomb.hex()):
        yield json.dumps(_replaced(tree, text)).encode()


def _replaced(tree: Any, text: str) -> Any:
    if isinstance(tree, dict):
        return {key: _replaced(value, text) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replaced(value, text) for value in tree]
    return text if isinstance(tree, str) else tree


def test_sec_05_a_pickle_bomb_in_every_decoder_does_nothing(registry: Registry, tmp_path: Path) -> None:
    marker = tmp_path / "it went off"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists(), "it is a bomb"
    marker.rmdir()
    for part in registry.values():
        for decoder in part:
            for data in (each for seed in decoder.seeds for each in with_bombs(seed, bomb)):
                with suppress(*decoder.refuses):
                    decoder.decode(data)
                assert not marker.exists(), decoder.name


def test_the_list_of_what_is_tried_is_true(registry: Registry) -> None:
    """tests/repo compares it with all readers that there are."""
    assert {decoder.name for part in registry.values() for decoder in part} == set(TRIED)


# -- the fuzzer itself -------------------------------------------------------------------------------------------------


def planted(data: bytes) -> None:
    if len(data) < 4:
        raise FrameError("too short")
    if data[3] > 200:
        raise IndexError("planted")


def test_a_planted_bug_is_found_and_told_with_its_input() -> None:
    found = fuzz(Decoder(name="planted", decode=planted, seeds=(b"abcd",)), seed=1, inputs=1000, cpu=time.thread_time)
    assert 0 < found.refused < found.inputs < 1000
    assert len(found.crashes) == 3
    with pytest.raises(IndexError, match="planted"):
        planted(found.crashes[0].data)
    assert "IndexError: planted" in str(found.crashes[0])


def test_one_that_takes_too_long_is_found() -> None:
    times = iter(range(0, 10_000, 3))
    decoder = Decoder(name="slow", decode=len, seeds=(b"a",))
    found = fuzz(decoder, seed=1, inputs=9, cpu=lambda: next(times), seconds=2.0)
    assert "it took 3.0 s of CPU, the limit is 2" in str(found.crashes[0])


def test_one_that_takes_too_much_memory_is_found() -> None:
    with bounded_memory() as limit:
        if isinstance(limit, Unavailable):
            pytest.skip(limit.reason)

    def greedy(_: bytes) -> object:
        return bytearray(1 << 40)

    found = fuzz(Decoder(name="greedy", decode=greedy, seeds=(b"a",)), seed=1, inputs=9, cpu=time.thread_time)
    assert "MemoryError" in str(found.crashes[0])


def test_the_same_seed_gives_the_same_inputs_of_bounded_length() -> None:
    seeds = (b'{"a": [1, 2.5, "x"], "b": null}', bytes(range(64)), b"")
    first, again, other = (
        [damaged(chance, seeds) for _ in range(300)] for chance in map(random.Random, ("1", "1", "2"))
    )
    assert first == again != other
    assert len(set(first)) > 200
    assert max(map(len, first)) <= MOST_BYTES
