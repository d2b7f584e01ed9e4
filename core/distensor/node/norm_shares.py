"""Which rank adds up the gradient of which weight, where several hold the same sums."""

from __future__ import annotations

from collections.abc import Mapping


def norm_share(sizes: Mapping[str, int], *, member: int, members: int) -> frozenset[str]:
    """The keys that `member` of `members` takes: each key one, elements as even as whole weights allow.

    Largest first to whoever has least (Graham's rule), ties by name, so that all ranks find the same without asking.
    """
    loads = [0] * members
    taken: set[str] = set()
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        least = loads.index(min(loads))
        loads[least] += sizes[key]
        if least == member:
            taken.add(key)
    return frozenset(taken)
