from __future__ import annotations

import os
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
def box(tmp_path: Path, wheels: Path) -> Iterator[Box]:
    made = Box(tmp_path, wheels)
    yield made
    pid = made.systemd / "pid"
    if pid.exists():  # a test that failed half-way
        try:
            os.killpg(int(pid.read_text()), 9)
        except ProcessLookupError:
            return
