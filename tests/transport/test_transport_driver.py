"""Commands and replies in parts: what was sent comes back, more than was allowed does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transport_kit import Authority, mesh

from distensor.core.errors import FrameError
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.driver import PART_BYTES, receive_named, send_named
from distensor.transport.tensors import encode_named


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with mesh(Authority(), 1, driver=True) as opened:
        yield opened


def test_large_sets_travel_in_parts(planes: dict[int, DataPlane]) -> None:
    large = PART_BYTES // 4 // 2 + 1
    tensors = {name: torch.full((large,), float(index)) for index, name in enumerate("abc")}
    before = planes[0].stats()[-1].messages_sent
    send_named(planes[0], -1, Channel.REPLY, 5, {"x": 1}, tensors)
    meta, found = receive_named(planes[-1], 0, Channel.REPLY, 5, 20.0, most=4 * PART_BYTES)
    assert meta == {"x": 1}
    assert list(found) == list("abc")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert planes[0].stats()[-1].messages_sent - before >= 3


def test_nothing_is_one_part(planes: dict[int, DataPlane]) -> None:
    send_named(planes[0], -1, Channel.REPLY, 6, {}, {})
    assert receive_named(planes[-1], 0, Channel.REPLY, 6, 20.0, most=0) == ({}, {})


def test_more_than_was_allowed_is_refused(planes: dict[int, DataPlane]) -> None:
    send_named(planes[0], -1, Channel.REPLY, 7, {}, {"a": torch.zeros(100)})
    with pytest.raises(FrameError, match=r"peer 0 sent 400 bytes.*at most 399"):
        receive_named(planes[-1], 0, Channel.REPLY, 7, 20.0, most=399)


def test_a_name_may_not_come_twice(planes: dict[int, DataPlane]) -> None:
    for index in range(2):
        header, buffers = encode_named({"a": torch.zeros(4)}, {"part": index, "parts": 2, "meta": {}})
        planes[0].send(-1, Tag(channel=Channel.REPLY, step=8, micro=index), header, buffers)
    with pytest.raises(FrameError, match="repeats a name"):
        receive_named(planes[-1], 0, Channel.REPLY, 8, 20.0)
