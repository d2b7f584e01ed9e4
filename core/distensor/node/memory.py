"""How a worker's C library treats the memory of tensors that were freed."""

from __future__ import annotations

import torch

_LARGEST = 31 << 20


def keep_freed_memory() -> None:
    """Let freed tensors of up to 31 MB be used again, instead of going back to the kernel.

    glibc takes large blocks from the kernel one by one and gives them back when they are freed, so that each activation
    and each gradient of a step costs a page fault for every 4 KB. It stops doing so for sizes that it has seen freed
    once (mallopt(3), dynamic mmap threshold: at most 32 MB), and keeps up to twice that at the end of its heap. This
    shows it such a block; its pages are never touched. Elsewhere it changes nothing.
    """
    torch.empty(_LARGEST, dtype=torch.uint8)
