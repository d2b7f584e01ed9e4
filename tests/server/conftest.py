from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's: the temporary directory of macOS alone is half of it."""
    path = Path(tempfile.mkdtemp(prefix="dt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
