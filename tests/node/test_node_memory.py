"""Tensors of a step use the memory of the step before."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or (HUGE.exists() and "[always]" in HUGE.read_text()),
    reason="it is glibc whose page faults are counted, on pages of 4 KB",
)

COUNT = """
import resource
import torch
from distensor.node.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(1 << 20) for _ in range(6)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
without = faults()
keep_freed_memory()
faults()
print(without, faults())
"""


@GLIBC
def test_freed_blocks_cost_no_page_faults_when_they_are_needed_again(python: Any) -> None:
    """Ten rounds of 24 MB are 61,440 pages."""
    without, kept = map(int, python("-c", COUNT).stdout.split())
    assert kept < 1000
    if without < 30_000:
        pytest.skip(f"{without} faults without it: something that lives long lay above the blocks in this heap")
