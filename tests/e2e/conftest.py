"""One local cluster for all end-to-end tests of a process: two nodes, twelve worker slots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distensor.training.sessions import Session, session

sys.path.append(str(Path(__file__).parents[1] / "training"))  # the small decoder of the mesh tests

WORKERS = 12
"""A slot costs nothing until a job takes it; jobs that several tests share keep theirs."""


@pytest.fixture(scope="package")
def mesh() -> Iterator[Session]:
    torch.set_num_threads(1)
    with session("local", workers=WORKERS, nodes=2, node_names=["atlas", "bolt"]) as opened:
        yield opened
