from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from installer_kit import Box, build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build_wheels(folder)
    return folder


@pytest.fixture
def box(wheels: Path) -> Iterator[Box]:
    """In a folder with a short name: the path of a socket has 100 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="dst") as folder:
        yield from _used(Box(Path(folder), wheels))


def _used(made: Box) -> Iterator[Box]:
    yield made
    pid = made.systemd / "pid"
    if pid.exists():  # a test that failed half-way
        try:
            os.killpg(int(pid.read_text()), 9)
        except ProcessLookupError:
            return
