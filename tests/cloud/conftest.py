"""A hub with its books in memory behind a real HTTP port, shared by the tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "hub"))

from cloud_kit import CloudHub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudHub]:
    with CloudHub(tmp_path_factory.mktemp("hub")) as running:
        yield running
