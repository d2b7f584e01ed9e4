"""Who has a GPU open, from /proc/PID/fdinfo (Documentation/gpu/drm-usage-stats.rst of the Linux kernel).

Only processes of the same user can be read without privileges: on a desktop those are its games and its browser.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

Clients: TypeAlias = dict[str, dict[int, int]]
"""PCI address -> process id -> bytes of its memory on the GPU."""

_MEMORY = ("drm-resident-vram", "drm-memory-vram")
"""Newer kernels first."""
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def drm_clients(root: Path) -> Clients:
    """All processes that can be seen, by GPU. Reads every file descriptor's name: not for every other second."""
    found: Clients = {}
    for folder in sorted((root / "proc").glob("[0-9]*")):
        seen: set[tuple[str, str]] = set()
        for facts in _open_gpus(folder):
            bus, client = facts.get("drm-pdev", ""), facts.get("drm-client-id", "")
            if (bus, client) not in seen:  # a descriptor that was duplicated is the same client
                seen.add((bus, client))
                by_pid = found.setdefault(bus, {})
                by_pid[int(folder.name)] = by_pid.get(int(folder.name), 0) + _memory(facts)
    return found


def _open_gpus(folder: Path) -> Iterator[dict[str, str]]:
    try:
        descriptors = [entry.name for entry in (folder / "fd").iterdir()]
    except OSError:
        return  # of another user, or gone
    for name in descriptors:
        try:
            if str((folder / "fd" / name).readlink()).startswith("/dev/dri/"):
                yield _facts((folder / "fdinfo" / name).read_text())
        except OSError:
            continue


def _facts(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _memory(facts: dict[str, str]) -> int:
    amount, _, unit = next((facts[key] for key in _MEMORY if key in facts), "0").partition(" ")
    return int(amount) * _UNITS.get(unit, 0) if amount.isdigit() else 0
