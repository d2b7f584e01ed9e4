"""The tensor codec: every dtype and shape bit-equal, and no header can hurt."""

from __future__ import annotations

import json
import struct
import tracemalloc
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transport_kit import Authority, mesh

from distensor.core.errors import ConfigError, FrameError
from distensor.transport import Channel, Message, Tag
from distensor.transport.tensors import (
    _CODES,
    ALIGNMENT,
    check_dtype,
    decode,
    decode_named,
    encode,
    encode_named,
)

DTYPES = tuple(_CODES)
# torch says so whenever it makes a complex32 tensor, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def message(header: bytes, buffers: Any) -> Message:
    return Message(header, bytearray(b"".join(bytes(buffer) for buffer in buffers)))


def there_and_back(tensors: list[Tensor]) -> list[Tensor]:
    return decode(message(*encode(tensors)))


def raw(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Every bit pattern may occur, not-a-number included; bool only takes 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    flat = bits.view(dtype)
    return flat[: torch.Size(shape).numel()].view(shape)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
    assert raw(ours) == raw(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (3, 5), (2, 0, 3), (17, 1, 9)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    [back] = there_and_back([tensor])
    assert_same(tensor, back)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.booleans(), st.booleans()),
        max_size=6,
    )
)
def test_any_list_of_tensors(items: list[Any]) -> None:
    tensors = []
    for dtype, shape, turned, grad in items:
        tensor = random_tensor(dtype, tuple(shape), len(tensors))
        tensor = tensor.transpose(0, -1) if turned and shape else tensor
        tensors.append(tensor.requires_grad_(grad and (dtype.is_floating_point or dtype.is_complex)))
    for ours, theirs in zip(tensors, there_and_back(tensors), strict=True):
        assert_same(ours, theirs)


def test_only_the_slice_is_sent() -> None:
    storage = torch.arange(1_000_000.0)
    for view in (
        storage[10:20],
        storage[::100_000],
        storage.view(1000, 1000)[:3, ::500],
        storage.view(1000, 1000).t()[0, :5],
    ):
        _, buffers = encode([view])
        assert sum(map(len, buffers)) <= view.numel() * 4 + ALIGNMENT
        assert_same(view, there_and_back([view])[0])


def test_contiguous_memory_is_not_copied_on_either_side() -> None:
    tensor = torch.zeros(1000)
    header, [data] = encode([tensor])
    tensor[3] = 7.0
    body = bytearray(data)
    [back] = decode(Message(header, body))
    assert back[3] == 7.0
    body[0:4] = struct.pack("=f", 5.0)
    assert back[0] == 5.0


def test_lazy_conjugates_and_negatives_are_sent_as_they_look() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (numbers.conj(), numbers.conj().imag, numbers.imag):
        [back] = there_and_back([lazy])
        assert torch.equal(back, lazy.resolve_conj().resolve_neg())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_memory_are_refused(tensor: Tensor) -> None:
    with pytest.raises(FrameError, match="no plain memory"):
        encode([torch.zeros(1), tensor])


def test_unsupported_dtypes_are_refused_by_name_at_plan_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(
        ConfigError, match=r"output 'hidden' of stage 1 has dtype torch\.qint8.*expected one of float32"
    ):
        check_dtype(quantized.dtype, "output 'hidden' of stage 1")
    check_dtype(torch.bfloat16, "anything")


def test_what_a_stage_may_return_arrives_bit_equal_through_a_real_link() -> None:
    """DTY-05: mixed dtypes between stages, with the right requires_grad."""
    angles = torch.arange(8.0)
    outputs = {
        "hidden": torch.randn(2, 3, 4, requires_grad=True) * 1.5,
        "ids": torch.tensor([[1, -(2**62)], [3, 4]]),
        "mask": torch.tensor([True, False, True]),
        "freqs_cis": torch.polar(torch.ones(8), angles),
        "aux": torch.randn(5, requires_grad=True).to(torch.bfloat16),
        "scalar": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    with mesh(Authority(), 2) as planes:
        header, buffers = encode_named(outputs, {"micro": 3, "loss": float("nan")})
        planes[0].send(1, Tag(Channel.ACTIVATION), header, buffers)
        meta, arrived = decode_named(planes[1].recv(0, Tag(Channel.ACTIVATION), 10))
    assert meta["micro"] == 3
    assert list(arrived) == list(outputs)
    assert [name for name, tensor in arrived.items() if tensor.requires_grad] == ["hidden", "aux"]
    for name, tensor in outputs.items():
        assert_same(tensor.detach().requires_grad_(tensor.requires_grad), arrived[name])


# -- hostile headers -------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.binary(max_size=64))
def test_no_header_crashes_or_allocates(header: bytes, body: bytes) -> None:
    for decoder in (decode, decode_named):
        try:
            decoder(Message(header, bytearray(body)))
        except FrameError:
            continue
        assert len(header) >= 4


@given(st.data())
def test_changed_headers_are_refused_or_describe_the_same_number_of_bytes(data: st.DataObject) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2]), "c": torch.empty(0, 2)}
    header, buffers = encode_named(tensors, {"k": [1, 2]})
    body = bytearray(b"".join(bytes(buffer) for buffer in buffers))
    changed = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for hostile in (bytes(changed), bytes(header[:cut]), bytes(changed[:cut])):
        try:
            _, found = decode_named(Message(hostile, body))
        except FrameError:
            continue
        assert sum(tensor.numel() * tensor.element_size() for tensor in found.values()) <= len(body)


def entry(code: int, flags: int, dims: tuple[int, ...]) -> bytes:
    return struct.pack(f"!3B{len(dims)}Q", code, flags, len(dims), *dims)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "ends at byte 0"),
        (struct.pack("!I", 2**32 - 1), "cannot describe 4294967295 tensors"),
        (struct.pack("!I", 1) + entry(99, 0, ()), "dtype code 99"),
        (struct.pack("!I", 1) + entry(1, 2, ()), "flags 2"),
        (struct.pack("!I", 1) + b"\x01\x00\xff", "255 dims"),
        (struct.pack("!I", 1) + entry(1, 0, (2**63, 2**63)), "has the shape"),
        (struct.pack("!I", 1) + entry(1, 0, (0, 2**63)), "has the shape"),
        (struct.pack("!I", 1) + entry(1, 0, (2**55,)), "lies outside a body"),
        (struct.pack("!I", 1) + entry(5, 1, (2,)), "cannot require a gradient"),
        (struct.pack("!I", 1) + entry(9, 0, (16,)), "the body has 32"),
        (struct.pack("!I", 1) + entry(9, 0, (32,)) + b"!", "1 bytes too many"),
    ],
)
def test_each_lie_is_named(header: bytes, words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match=words):
            decode(Message(header, bytearray(32)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def named_header(words: Any, count: int = 0) -> bytes:
    data = words if isinstance(words, bytes) else json.dumps(words).encode()
    return struct.pack("!I", len(data)) + data + struct.pack("!I", count)


@pytest.mark.parametrize(
    "header",
    [
        named_header(b"not json"),
        named_header(b"\xff\xfe"),
        named_header(b"[" * 100_000),
        named_header(b"9" * 100_000),
        named_header([]),
        named_header({"meta": {}}),
        named_header({"meta": [], "names": []}),
        named_header({"meta": {}, "names": [1]}),
        named_header({"meta": {}, "names": ["a"]}),
        named_header({"meta": {}, "names": ["a", "a"]}),
        struct.pack("!I", 1000) + b"{}",
        b"\x00",
    ],
    ids=range(12),
)
def test_hostile_names_are_refused(header: bytes) -> None:
    with pytest.raises(FrameError):
        decode_named(Message(header, bytearray()))
