"""One local cluster for all end-to-end tests of a process: two nodes, four worker slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distensor.training.sessions import Session, session


@pytest.fixture(scope="package")
def mesh() -> Iterator[Session]:
    torch.set_num_threads(1)
    with session("local", workers=4, nodes=2, node_names=["atlas", "bolt"]) as opened:
        yield opened
