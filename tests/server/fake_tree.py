"""Trees of files as the kernel shows them, from a recording or from the test's own words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


def grow(root: Path, files: Mapping[str, str | int]) -> Path:
    """Write the files below `root`, which is returned."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def recorded(name: str) -> dict[str, str]:
    """A recording of `fixtures`, whose README says where it is from."""
    found: dict[str, str] = json.loads((FIXTURES / name).read_text())
    return found
