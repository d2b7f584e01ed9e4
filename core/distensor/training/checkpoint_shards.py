"""The safetensors files of a checkpoint: which tensor goes where, writing, checking and reading them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from distensor.core.errors import CheckpointError, StoreError
from distensor.program.calls import DTYPES
from distensor.training.checkpoint_manifest import FileEntry, Group, Manifest, TensorEntry, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 256 << 20
"""A file holds as many tensors as fit in this, or one larger one; so much of a model is in memory at once."""

_READ_BYTES = 1 << 20

Specs: TypeAlias = Mapping[Group, Mapping[str, TensorSpec]]
Plan: TypeAlias = Mapping[str, tuple[Group, Sequence[str]]]
"""File name -> whose tensors, and which."""
Fetch: TypeAlias = "Callable[[Group, str], Tensor]"


def plan_files(specs: Specs, limit: int = FILE_BYTES) -> dict[str, tuple[Group, Sequence[str]]]:
    """The tensors of each group, in their order, in files named `GROUP-00001-of-00003.safetensors`."""
    plan: dict[str, tuple[Group, Sequence[str]]] = {}
    for group, named in specs.items():
        parts = _parts(named, limit)
        for number, names in enumerate(parts, start=1):
            plan[f"{group.value}-{number:05}-of-{len(parts):05}.safetensors"] = (group, names)
    return plan


def _parts(named: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    parts: list[list[str]] = []
    room = 0
    for name, spec in named.items():
        if not parts or spec.nbytes > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= spec.nbytes
    return parts


def entries_of(specs: Specs, plan: Plan) -> dict[Group, dict[str, TensorEntry]]:
    """What the manifest says of each tensor."""
    entries: dict[Group, dict[str, TensorEntry]] = {group: {} for group in specs}
    for file, (group, names) in plan.items():
        entries[group].update({name: TensorEntry(spec=specs[group][name], file=file) for name in names})
    return entries


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """One safetensors file, on the disk when this returns.

    Raises:
        StoreError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        return describe_file(path, flush=True)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"checkpoint file {path} cannot be written: {error}") from error


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """A small file, on the disk when this returns. Raises StoreError."""
    try:
        path.write_bytes(content)
        return describe_file(path, flush=True)
    except OSError as error:
        raise StoreError(f"checkpoint file {path} cannot be written: {error}") from error


def describe_file(path: Path, *, flush: bool = False) -> FileEntry:
    """Size and hash of what is in the file now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        while block := stream.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size=size, sha256=digest.hexdigest())


def damages(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files, one line each: missing, another size, another hash."""
    return [line for name, entry in manifest.files.items() if (line := _damage(folder / name, entry)) is not None]


def _damage(path: Path, expected: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes, the manifest says {expected.size}"
        found = describe_file(path)
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"
    if found.sha256 != expected.sha256:
        return (
            f"{path.name} is damaged: its sha256 is {found.sha256[:12]}..., the manifest says {expected.sha256[:12]}..."
        )
    return None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError with everything that is wrong with any file."""
    found = damages(folder, manifest)
    if found:
        raise CheckpointError(f"checkpoint {folder} cannot be used: {'; '.join(found)}")


def read_tensors(
    folder: Path, manifest: Manifest, group: Group, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of a group one by one, as the manifest says they look.

    Raises:
        CheckpointError: a file that does not hold what the manifest says.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as opened:
        streams: dict[str, Any] = {}
        for name, entry in manifest.tensors.get(group, {}).items():
            if not wanted(name):
                continue
            try:
                if entry.file not in streams:
                    streams[entry.file] = opened.enter_context(safe_open(folder / entry.file, framework="pt"))
                tensor = streams[entry.file].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / entry.file}: {name!r} cannot be read: {error}") from error
            spec = spec_of(tensor)
            if spec != entry.spec:
                raise CheckpointError(f"{folder / entry.file}: {name!r} is {spec}, the manifest says {entry.spec}")
            yield name, tensor


def spec_of(tensor: Tensor) -> TensorSpec:
    """Raises CheckpointError for a dtype that no stage program knows either."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"a tensor of {tensor.dtype} cannot be part of a checkpoint")
    return TensorSpec(dtype=dtype, shape=tuple(tensor.shape))
