"""Tensors of a step use the memory of the step before."""

from __future__ import annotations

import platform
from typing import Any

import pytest

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked where a block lies")
COUNT = """
import ctypes
import torch
from distensor.node.memory import keep_freed_memory

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Heap

def mapped(mebibytes):
    before = mallinfo().hblks
    block = torch.empty(mebibytes << 20, dtype=torch.uint8)
    return mallinfo().hblks - before

first = mapped(24)  # a size that was freed once is no longer taken from the kernel, so the next ones are larger
second = mapped(26)
keep_freed_memory()
print(first, second, mapped(28), mapped(30))
"""


@GLIBC
def test_a_block_comes_from_the_heap_and_stays_there_when_it_is_freed(python: Any) -> None:
    """A block that the kernel maps by itself costs a page fault for every 4 KB, each time anew."""
    assert python("-c", COUNT).stdout.split() == ["1", "1", "0", "0"]
