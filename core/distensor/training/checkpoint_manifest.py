"""The manifest of a checkpoint: what is in it, in which file, and how to tell that it is whole. Pure data, no files.

A checkpoint is a folder with safetensors files and `manifest.json`, which is written last: where there is a manifest
that reads, all that it names was on the disk before.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from distensor.core.errors import CheckpointError
from distensor.program.values import DType

T = TypeVar("T")

FORMAT = "distensor-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST = 1 << 53


class Group(StrEnum):
    """What a tensor belongs to; the first part of the name of its file."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    RNG = "rng"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor as it is written: full, unsharded."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where a tensor is, and what it looks like."""

    spec: TensorSpec
    file: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 (hexadecimal) of a file of the checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One complete checkpoint.

    Attributes:
        step: committed optimizer steps.
        serial: rises with every checkpoint of a folder; the highest one is the latest, whatever its step.
        tensors: by group, then by name. Of the model: names of parameters and persistent buffers. Of the optimizer:
            "parameter name/state name". Of the random numbers: "when/stream".
        aliases: further names of tied weights -> the name under which the tensor is stored.
        run: the trainer's settings and learning rate, as JSON.
        position: where in the data the run was, as JSON; None outside of `fit`.
    """

    step: int
    serial: int
    tensors: Mapping[Group, Mapping[str, TensorEntry]]
    aliases: Mapping[str, str]
    files: Mapping[str, FileEntry]
    run: Mapping[str, Any]
    position: Mapping[str, Any] | None

    def specs(self, group: Group) -> dict[str, TensorSpec]:
        return {name: entry.spec for name, entry in self.tensors.get(group, {}).items()}

    def to_json(self) -> bytes:
        """For people too: indented, and with a hash of its own content."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "serial": self.serial,
            "run": dict(self.run),
            "position": None if self.position is None else dict(self.position),
            "aliases": dict(self.aliases),
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in self.files.items()},
            "tensors": {
                group.value: {name: _tensor_json(entry) for name, entry in entries.items()}
                for group, entries in self.tensors.items()
            },
        }
        content["sha256"] = _digest(content)
        return json.dumps(content, indent=1, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes, *, where: str) -> Manifest:
        """Raises CheckpointError naming `where` and what is wrong: no manifest, a newer one, or a damaged one."""
        content = _content(text, where)
        _check_version(content, where)
        try:
            manifest = _read(content)
        except (_ShapeError, RecursionError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        if content.get("sha256") != _digest(content):
            raise CheckpointError(f"{where}: its sha256 is not that of its content; it was damaged or changed by hand")
        return manifest


def _tensor_json(entry: TensorEntry) -> dict[str, Any]:
    return {"dtype": entry.spec.dtype.value, "shape": list(entry.spec.shape), "file": entry.file}


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _content(text: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{where} is no manifest of a checkpoint: it does not say format={FORMAT!r}")
    return content


def _check_version(content: Mapping[str, Any], where: str) -> None:
    version = content.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where}: version={version!r}; expected a whole number")
    if version > VERSION:
        raise CheckpointError(
            f"{where} has format version {version}; this distensor reads up to {VERSION}: use a newer one"
        )


class _ShapeError(ValueError):
    """A field that is missing or of another kind."""


def _read(content: Mapping[str, Any]) -> Manifest:
    position = content.get("position")
    files = _table(content, "files", _file_name, _file)
    tensors = _table(content, "tensors", _group, lambda value: _tensors(value, files))
    model = tensors.get(Group.MODEL, {})
    return Manifest(
        step=_whole(content, "step"),
        serial=_whole(content, "serial"),
        run=_object(content, "run"),
        position=None if position is None else _object(content, "position"),
        aliases=_table(content, "aliases", str, lambda value: _one_of(value, model)),
        files=files,
        tensors=tensors,
    )


def _object(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise _ShapeError(f"{key}={_short(value)}: expected an object")
    return value


K = TypeVar("K", bound=str)


def _table(content: Mapping[str, Any], key: str, name: Callable[[str], K], read: Callable[[Any], T]) -> dict[K, T]:
    found = {}
    for text, value in _object(content, key).items():
        try:
            found[name(text)] = read(value)
        except (_ShapeError, ValueError) as error:
            raise _ShapeError(f"{key}[{_short(text)}]: {error}") from None
    return found


def _group(text: str) -> Group:
    if text not in list(Group):
        raise _ShapeError(f"expected one of {', '.join(Group)}")
    return Group(text)


def _file_name(text: str) -> str:
    """A plain name: a manifest never leads out of its folder."""
    if not _FILE_NAME.fullmatch(text):
        raise _ShapeError("expected a plain file name")
    return text


def _file(value: Any) -> FileEntry:
    digest = value.get("sha256") if isinstance(value, dict) else None
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise _ShapeError(f"{_short(value)}: expected size and sha256")
    return FileEntry(size=_whole(value, "size"), sha256=digest)


def _tensors(value: Any, files: Mapping[str, FileEntry]) -> dict[str, TensorEntry]:
    return _table({"tensors": value}, "tensors", str, lambda item: _tensor(item, files))


def _tensor(value: Any, files: Mapping[str, FileEntry]) -> TensorEntry:
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        raise _ShapeError(f"{_short(value)}: expected dtype, shape and file")
    shape = value["shape"]
    if not all(type(extent) is int and 0 <= extent <= _MOST for extent in shape):
        raise _ShapeError(f"shape={_short(shape)}: expected whole numbers")
    spec = TensorSpec(dtype=DType(_one_of(value.get("dtype"), list(DType))), shape=tuple(shape))
    return TensorEntry(spec=spec, file=_one_of(value.get("file"), files))


def _one_of(value: Any, known: Mapping[str, Any] | list[DType]) -> str:
    if not isinstance(value, str) or value not in known:
        raise _ShapeError(f"{_short(value)} is not known here")
    return value


def _whole(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise _ShapeError(f"{key}={_short(value)}: expected a whole number")
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]
