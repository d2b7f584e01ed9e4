"""Every node is an open file of the hub."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from distensor.hub.descriptors import too_few

SCRIPT = """
import resource
from distensor.hub.descriptors import room_for_streams
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1024))
print(room_for_streams(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1024:
        pytest.skip("this user may not have so many files open")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["924", "1024"]


def test_a_hub_that_knows_more_nodes_than_it_can_have_says_so() -> None:
    assert too_few(None, 1_000_000) == ""
    assert too_few(100, 99) == ""
    assert "streams of 100 nodes, and 200 are known" in too_few(100, 200)
