"""One local cluster for all end-to-end tests of a process: two nodes, twelve worker slots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from distensor.core.errors import SessionError
from distensor.training.sessions import Session, current_session, session

sys.path.append(str(Path(__file__).parents[1] / "training"))  # the small decoder of the mesh tests

HERE = Path(__file__).parent
WORKERS = 12
"""A slot costs nothing until a job takes it; jobs that several tests share keep theirs."""

_shared = ExitStack()


@pytest.fixture(scope="module")
def mesh() -> Session:
    try:
        return current_session()
    except SessionError:
        torch.set_num_threads(1)
        return _shared.enter_context(session("local", workers=WORKERS, nodes=2, node_names=["atlas", "bolt"]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """The cluster ends with the last end-to-end test of this process: tests of other folders know no session.

    pytest ends what has the scope "package" with the whole run where folders of tests have no `__init__.py`.
    """
    yield
    if nextitem is None or HERE not in nextitem.path.parents:
        _shared.close()
