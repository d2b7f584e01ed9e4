"""A worker's copy for a checkpoint: of one moment, read piece by piece, while commands go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from node_kit import planes_of

from distensor.core import DRIVER_RANK
from distensor.core.errors import PeerLostError, WorkerFailedError
from distensor.node.snapshots import SnapshotServer
from distensor.program.values import DType
from distensor.training.checkpoint_manifest import TensorSpec
from distensor.training.checkpoint_shards import spec_of
from distensor.training.snapshot_reading import SnapshotReader
from distensor.transport import Channel, DataPlane
from distensor.transport.driver import PIECE_BYTES, receive_named, send_named


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(1, driver=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(planes: dict[int, DataPlane]) -> SnapshotServer:
    return SnapshotServer(planes[0])


@pytest.fixture(scope="module")
def reader(planes: dict[int, DataPlane]) -> SnapshotReader:
    return SnapshotReader(planes[DRIVER_RANK])


def test_the_copy_is_of_the_moment_it_was_made(server: SnapshotServer, reader: SnapshotReader) -> None:
    tensors = {
        "0/w": torch.arange(12.0).view(3, 4).t(),
        "0/half": torch.ones(5).bfloat16(),
        "0/w/step": torch.tensor(7.0),
        "1/flags": torch.tensor([True, False]),
        "1/none": torch.zeros(0, 3),
    }
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    server.take(1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    for key, tensor in expected.items():
        found = reader.read(0, 1, key, spec_of(tensor))
        assert found.dtype is tensor.dtype
        assert torch.equal(found, tensor)


def test_a_large_tensor_comes_in_pieces_and_commands_pass_between_them(
    server: SnapshotServer, reader: SnapshotReader, planes: dict[int, DataPlane]
) -> None:
    large = torch.arange(PIECE_BYTES // 4 * 2 + 3, dtype=torch.float32)
    server.take(2, {"0/w": large})
    before = planes[DRIVER_RANK].stats()[0].messages_received
    send_named(planes[0], DRIVER_RANK, Channel.REPLY, 5, {"code": "ok"}, {})
    assert torch.equal(reader.read(0, 2, "0/w", spec_of(large)), large)
    assert planes[DRIVER_RANK].stats()[0].messages_received - before == 3 + 1
    assert receive_named(planes[DRIVER_RANK], 0, Channel.REPLY, 5, 5.0)[0] == {"code": "ok"}


def test_a_copy_that_was_dropped_or_replaced_is_gone(server: SnapshotServer, reader: SnapshotReader) -> None:
    one = torch.ones(1)
    server.take(3, {"0/w": one})
    server.take(4, {"0/w": one})
    with pytest.raises(WorkerFailedError, match="rank 0: snapshot 3 is not here; 4 is"):
        reader.read(0, 3, "0/w", spec_of(one))
    reader.drop(0, 4)
    with pytest.raises(WorkerFailedError, match="snapshot 4 is not here"):
        reader.read(0, 4, "0/w", spec_of(one))


@pytest.mark.parametrize(
    ("key", "spec", "said"),
    [
        ("0/other", TensorSpec(dtype=DType.FLOAT32, shape=(2,)), "'0/other' is not part of snapshot 5"),
        ("0/w", TensorSpec(dtype=DType.FLOAT64, shape=(2,)), "something else than torch.float64"),
        ("0/w", TensorSpec(dtype=DType.FLOAT32, shape=(1,)), "sent 2 elements of '0/w' from 0 on"),
        ("0/w", TensorSpec(dtype=DType.FLOAT32, shape=(3,)), "sent 0 elements of '0/w' from 2 on"),
    ],
)
def test_an_answer_that_is_another_tensor_is_refused(
    server: SnapshotServer, reader: SnapshotReader, key: str, spec: TensorSpec, said: str
) -> None:
    server.take(5, {"0/w": torch.ones(2)})
    with pytest.raises(WorkerFailedError, match=said):
        reader.read(0, 5, key, spec)


@pytest.mark.parametrize("start", [-1, 3, "0", None, 1.0, True])
def test_a_request_that_is_none_is_answered_with_what_is_wrong(
    server: SnapshotServer, reader: SnapshotReader, start: Any
) -> None:
    server.take(6, {"0/w": torch.ones(2)})
    with pytest.raises(WorkerFailedError, match=r"start=.*expected an element from 0 to 2"):
        reader._ask(0, {"number": 6, "key": "0/w", "start": start})


def test_a_driver_that_goes_away_ends_the_server() -> None:
    with planes_of(1, driver=True) as own:
        server, reader = SnapshotServer(own[0]), SnapshotReader(own[DRIVER_RANK])
        server.take(1, {"0/w": torch.ones(1)})
        assert server._thread is not None
        own[DRIVER_RANK].close()
        server._thread.join(10)
        assert not server._thread.is_alive()
        with pytest.raises(PeerLostError):
            reader.read(0, 1, "0/w", spec_of(torch.ones(1)))
