"""Tensors as a compact header and raw bytes: any dtype torch has, any shape, bit-equal, and never a pickle.

Header of a list: count (u32), then for each tensor dtype code (u8), flags (u8, bit 0: requires grad), number of dims
(u8), dims (u64 each). A named list puts a JSON object {"meta": {}, "names": []} with its length (u32) before that.
Body: the elements of each tensor in row-major order, each tensor padded to 16 bytes, so that what is decoded is
aligned and needs no copy.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distensor.core.errors import ConfigError, FrameError
from distensor.transport.types import Buffer, Message

ALIGNMENT = 16
MAX_DIMS = 64
MAX_ELEMENTS = 1 << 56
_COUNT = struct.Struct("!I")
_ENTRY = struct.Struct("!3B")
_REQUIRES_GRAD = 1

# A number here is for ever: both ends of a connection may run different versions.
_CODES: Mapping[torch.dtype, int] = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int64: 5,
    torch.int32: 6,
    torch.int16: 7,
    torch.int8: 8,
    torch.uint8: 9,
    torch.bool: 10,
    torch.complex64: 11,
    torch.complex128: 12,
    torch.complex32: 13,
    torch.uint16: 14,
    torch.uint32: 15,
    torch.uint64: 16,
    torch.float8_e4m3fn: 17,
    torch.float8_e5m2: 18,
    torch.float8_e4m3fnuz: 19,
    torch.float8_e5m2fnuz: 20,
    torch.float8_e8m0fnu: 21,
}
_DTYPES: Mapping[int, torch.dtype] = {code: dtype for dtype, code in _CODES.items()}


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raise ConfigError, naming `name`, if tensors of this dtype cannot be sent."""
    if dtype not in _CODES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _CODES)
        raise ConfigError(f"{name} has dtype {dtype}, which cannot be sent between workers; expected one of {known}")


def encode(tensors: Sequence[Tensor]) -> tuple[bytes, list[Buffer]]:
    """Header and buffers of a message. The buffers are the tensors' own memory wherever that is contiguous.

    Raises:
        ConfigError: a dtype that cannot be sent.
        FrameError: a tensor without plain memory (sparse, meta, nested).
    """
    header = [_COUNT.pack(len(tensors))]
    buffers: list[Buffer] = []
    for index, tensor in enumerate(tensors):
        header.append(_describe(tensor, f"tensor {index}"))
        data = tensor_bytes(tensor)
        buffers.append(data)
        if padding := -len(data) % ALIGNMENT:
            buffers.append(bytes(padding))
    return b"".join(header), buffers


def decode(message: Message) -> list[Tensor]:
    """The tensors of a message; they share its body's memory.

    Raises:
        FrameError: the header lies about the body, or is no header at all.
    """
    tensors, end = _decode_table(message.header, 0, message.body)
    if end != len(message.header):
        raise FrameError(f"{len(message.header) - end} bytes too many after a tensor header")
    return tensors


def encode_named(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[bytes, list[Buffer]]:
    """Like `encode`, with names and a JSON object."""
    words = json.dumps({"meta": dict(meta), "names": list(tensors)}, separators=(",", ":")).encode()
    header, buffers = encode(list(tensors.values()))
    return _COUNT.pack(len(words)) + words + header, buffers


def decode_named(message: Message) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `encode_named`: (meta, tensors by name).

    Raises:
        FrameError: not such a message.
    """
    header = message.header
    (size,) = _unpack(_COUNT, header, 0)
    start = _COUNT.size + size
    if start > len(header):
        raise FrameError(f"a named header says {size} bytes of JSON and has {len(header) - _COUNT.size}")
    meta, names = _parse_words(header[_COUNT.size : start])
    tensors, end = _decode_table(header, start, message.body)
    if end != len(header) or len(tensors) != len(names):
        raise FrameError(f"a named header has {len(names)} names for {len(tensors)} tensors, or bytes too many")
    return meta, dict(zip(names, tensors, strict=True))


def _parse_words(data: bytes) -> tuple[dict[str, Any], list[str]]:
    try:
        words = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a named header is not JSON: {error}") from error
    meta, names = (words.get("meta"), words.get("names")) if isinstance(words, dict) else (None, None)
    if not isinstance(meta, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FrameError('a named header is not {"meta": {...}, "names": [...]}')
    if len(set(names)) != len(names):
        raise FrameError("a named header has a name twice")
    return meta, names


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order: the tensor's own memory if it is contiguous, else a copy of the slice."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel() == 0:
        return memoryview(b"")
    array = plain.reshape(-1).view(torch.uint8).numpy()
    return array.data


def _describe(tensor: Tensor, name: str) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise FrameError(f"{name} ({tensor.layout}, {tensor.device}, {tensor.dtype}) has no plain memory to send")
    check_dtype(tensor.dtype, name)
    flags = _REQUIRES_GRAD if tensor.requires_grad else 0
    dims = struct.pack(f"!{tensor.dim()}Q", *tensor.shape)
    return _ENTRY.pack(_CODES[tensor.dtype], flags, tensor.dim()) + dims


def _decode_table(header: bytes, start: int, body: Buffer) -> tuple[list[Tensor], int]:
    (count,) = _unpack(_COUNT, header, start)
    end = start + _COUNT.size
    if count * _ENTRY.size > len(header) - end:
        raise FrameError(f"a header of {len(header)} bytes cannot describe {count} tensors")
    tensors: list[Tensor] = []
    offset = 0
    for _ in range(count):
        dtype, flags, shape, end = _decode_entry(header, end)
        size = math.prod(shape) * dtype.itemsize
        tensors.append(_view(body, offset, dtype, shape, size).requires_grad_(bool(flags & _REQUIRES_GRAD)))
        offset += size + -size % ALIGNMENT
    if offset != len(body):
        raise FrameError(f"a header describes {offset} bytes of tensors; the body has {len(body)}")
    return tensors, end


def _decode_entry(header: bytes, start: int) -> tuple[torch.dtype, int, tuple[int, ...], int]:
    code, flags, dims = _unpack(_ENTRY, header, start)
    start += _ENTRY.size
    if code not in _DTYPES or flags > _REQUIRES_GRAD or dims > MAX_DIMS:
        raise FrameError(f"a tensor header has dtype code {code}, flags {flags} and {dims} dims")
    shape = _unpack(struct.Struct(f"!{dims}Q"), header, start)
    # Empty dims must not hide huge ones: strides are products of all of them.
    if math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
        raise FrameError(f"a tensor header has the shape {shape}")
    dtype = _DTYPES[code]
    if flags and not (dtype.is_floating_point or dtype.is_complex):
        raise FrameError(f"a tensor of {dtype} cannot require a gradient")
    return dtype, flags, shape, start + 8 * dims


def _view(body: Buffer, offset: int, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> Tensor:
    if offset + size > len(body):
        raise FrameError(f"a tensor of {size} bytes at {offset} lies outside a body of {len(body)}")
    if size == 0:
        return torch.empty(0, dtype=torch.uint8).view(dtype).view(shape)
    room = body if not memoryview(body).readonly else bytearray(body)
    return torch.frombuffer(room, dtype=torch.uint8, count=size, offset=offset).view(dtype).view(shape)


def _unpack(form: struct.Struct, data: bytes, offset: int) -> tuple[Any, ...]:
    if offset + form.size > len(data):
        raise FrameError(f"a tensor header ends at byte {len(data)}; {offset + form.size} are needed")
    return form.unpack_from(data, offset)
