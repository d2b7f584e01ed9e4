"""Writing one checkpoint: file after file, then the manifest, then the old ones go."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_manifest import FileEntry, Group, Manifest
from distensor.training.checkpoint_shards import (
    FILE_BYTES,
    Fetch,
    Plan,
    Specs,
    entries_of,
    plan_files,
    write_bytes,
    write_tensors,
)

INDEX = "model.safetensors.index.json"
"""Which file holds which weight, as Hugging Face's loaders expect it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A checkpoint before it is written: everything but the tensors themselves."""

    step: int
    specs: Specs
    aliases: Mapping[str, str]
    run: Mapping[str, Any]
    position: Mapping[str, Any] | None


def write_checkpoint(
    folder: CheckpointFolder, draft: Draft, fetch: Fetch, *, keep: int, file_bytes: int = FILE_BYTES
) -> Saved:
    """Fetch and write all tensors, one file's worth at a time; the caller holds `folder.writing()`.

    Raises:
        StoreError: something cannot be written; nothing that was complete before is touched.
        Whatever `fetch` raises; the unfinished folder is removed then too.
    """
    path = folder.begin(draft.step)
    try:
        plan = plan_files(draft.specs, file_bytes)
        files = _write_files(path, plan, fetch)
        files[INDEX] = write_bytes(path / INDEX, _index(draft, plan))
        manifest = Manifest(
            step=draft.step,
            serial=folder.next_serial(),
            tensors=entries_of(draft.specs, plan),
            aliases=draft.aliases,
            files=files,
            run=draft.run,
            position=draft.position,
        )
        saved = folder.commit(path, manifest)
    except BaseException:  # an interrupt included: an incomplete folder serves nobody
        shutil.rmtree(path, ignore_errors=True)
        raise
    folder.prune(keep)
    return saved


def _write_files(path: Path, plan: Plan, fetch: Fetch) -> dict[str, FileEntry]:
    return {
        file: write_tensors(path / file, {name: fetch(group, name) for name in names})
        for file, (group, names) in plan.items()
    }


def _index(draft: Draft, plan: Plan) -> bytes:
    weights = {name: file for file, (group, names) in plan.items() if group is Group.MODEL for name in names}
    size = sum(spec.nbytes for spec in draft.specs.get(Group.MODEL, {}).values())
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=1).encode()
