"""The memory of message bodies is used again, and never while somebody still looks at it."""

from __future__ import annotations

import torch
from transport_kit import Authority, mesh

from distensor.transport import Channel, Tag
from distensor.transport.wire import Rooms

SIZE = 1 << 16


def test_a_room_comes_again_when_nobody_refers_to_it() -> None:
    rooms = Rooms()
    first = rooms.take(SIZE)
    rooms.keep(first)
    second = rooms.take(SIZE)
    assert second is not first, "it is still in our hands"
    rooms.keep(second)
    known = {id(first), id(second)}
    del first, second
    third, fourth = rooms.take(SIZE), rooms.take(SIZE)
    assert {id(third), id(fourth)} == known
    assert len(rooms.take(SIZE // 2)) == SIZE // 2


def test_a_view_or_a_tensor_on_a_room_holds_it() -> None:
    rooms = Rooms()
    room = rooms.take(SIZE)
    rooms.keep(room)
    known = id(room)
    view = memoryview(room)[5:7]
    tensor = torch.frombuffer(room, dtype=torch.uint8)[3:].view(-1)
    del room
    assert id(rooms.take(SIZE)) != known
    del view
    assert id(rooms.take(SIZE)) != known, "the tensor still shows it"
    del tensor
    assert id(rooms.take(SIZE)) == known


def test_small_rooms_are_not_kept_and_large_ones_only_up_to_a_bound() -> None:
    rooms = Rooms()
    rooms.keep(rooms.take(100))
    assert not rooms._kept
    for _ in range(20):
        rooms.keep(rooms.take(1 << 20))
    assert sum(map(len, rooms._kept)) <= 1 << 22


def test_messages_of_one_size_never_share_memory_while_they_are_held() -> None:
    with mesh(Authority(), 2) as planes:
        for value in range(6):
            planes[0].send(1, Tag(Channel.P2P), b"", [bytes([value]) * SIZE]).wait(10)
        held = [planes[1].recv(0, Tag(Channel.P2P), 10).body for _ in range(6)]
        assert [bytes(body) for body in held] == [bytes([value]) * SIZE for value in range(6)]
        del held
        planes[0].send(1, Tag(Channel.P2P), b"", [b"x" * SIZE]).wait(10)
        assert bytes(planes[1].recv(0, Tag(Channel.P2P), 10).body) == b"x" * SIZE
