"""Where dropout takes its randomness from: a hash of the place in the run, so that a rerun repeats it."""

from __future__ import annotations

import hashlib


def dropout_seed(job_seed: int, step: int, replica: int, micro_batch: int) -> int:
    """A 63-bit seed. Replicas and micro-batches differ, since they hold different rows; a rerun is the same.

    Stages share it: a program numbers its random places across the whole module, so that the cut does not matter.
    """
    text = f"dropout/{job_seed}/{step}/{replica}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
