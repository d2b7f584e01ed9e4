"""A stage on disk: its program as JSON and its weights as safetensors, both named by the program's sha256.

Files come from anywhere, so they are checked as foreign bytes are: sizes before reading, the digest, the whole program,
then every tensor's name, dtype and shape against what the program declares.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distensor.core.errors import ProgramRejectedError, StoreError
from distensor.program.stage_program import StageProgram
from distensor.program.values import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct("<Q")
_MOST_HEADER = 16 << 20


def save_stage(folder: Path, program: StageProgram, weights: Mapping[str, Tensor]) -> str:
    """Write DIGEST.json and DIGEST.safetensors, the program last; returns the digest.

    Raises:
        StoreError: the files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    digest = program.digest()
    target = folder / f"{digest}.safetensors"
    partial = folder / f"{digest}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in weights.items()}, partial)
        partial.replace(target)
        partial.write_bytes(program.to_json())
        partial.replace(folder / f"{digest}.json")
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"stage {digest} cannot be written to {folder}: {error}") from error
    return digest


def load_stage(folder: Path, digest: str, limits: Limits = DEFAULT_LIMITS) -> tuple[StageProgram, dict[str, Tensor]]:
    """Read and check what `save_stage` wrote. Nothing of it has run when this returns.

    Raises:
        ProgramRejectedError: the program is not allowed, is not the one of this digest, or the weights are not its.
        StoreError: a file is missing or cannot be read.
    """
    text = _read(folder / f"{digest}.json", limits.max_json_bytes)
    program = StageProgram.from_json(text, limits)
    if program.digest() != digest:
        raise ProgramRejectedError(f"{folder / digest}.json holds the program {program.digest()}")
    return program, _load_weights(folder / f"{digest}.safetensors", program, limits)


def _load_weights(path: Path, program: StageProgram, limits: Limits) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = _read(path, limits.max_bytes)
    _check_table(path, data, program)
    try:
        return load(data)
    except (SafetensorError, ValueError) as error:
        raise ProgramRejectedError(f"{path}: not a safetensors file: {error}") from error


def _check_table(path: Path, data: bytes, program: StageProgram) -> None:
    """The file's own table against the program's declarations, before any tensor is made."""
    found = _table(path, data)
    wanted = {spec.name: spec for spec in (*program.parameters, *program.buffers)}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise ProgramRejectedError(f"{path}: missing weights {missing[:5]}, unknown ones {unknown[:5]}")
    for name, spec in wanted.items():
        entry = found[name]
        shape, dtype = entry.get("shape"), entry.get("dtype")
        if shape != list(spec.shape) or dtype != _SAFETENSORS_NAMES[spec.dtype.value]:
            raise ProgramRejectedError(f"{path}: {name} is {dtype} {shape}, not {spec.dtype.value} {list(spec.shape)}")


def _table(path: Path, data: bytes) -> dict[str, dict[str, object]]:
    size = _HEADER.unpack_from(data)[0] if len(data) >= _HEADER.size else -1
    if not 0 < size <= min(_MOST_HEADER, len(data) - _HEADER.size):
        raise ProgramRejectedError(f"{path}: truncated, or not a safetensors file ({len(data)} bytes)")
    try:
        table = json.loads(data[_HEADER.size : _HEADER.size + size])
    except (ValueError, RecursionError) as error:
        raise ProgramRejectedError(f"{path}: its table is not JSON: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise ProgramRejectedError(f"{path}: its table is not an object of objects")
    table.pop("__metadata__", None)
    return table


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    if len(data) > most:
        raise ProgramRejectedError(f"{path}: larger than the limit of {most} bytes")
    return data


_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "complex128": "C128",
}
