"""Which rank adds up the gradient of which weight, where several hold the same sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distensor.optim.updater import name_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from distensor.node.orders import JobPlan


def counted_keys(
    plan: JobPlan, updated: Mapping[str, Tensor], *, whole: bool, group: dist.ProcessGroup | None
) -> frozenset[str]:
    """The weights whose gradient this rank adds up: each element of the model is counted once in the whole mesh.

    After the sum, all ranks of `group` hold the same and share the work; None: each has its part. On tp a weight is
    either cut, and each rank has its part, or the same everywhere, and the first one counts (`whole`). Of a tied weight
    the first holder counts.
    """
    copies = {f"{stage}/{name}" for tied in plan.tied for stage, name in tied.holders[1:]}
    counted = {
        key: parameter.numel()
        for key, parameter in updated.items()
        if parameter.requires_grad and key not in copies and (whole or name_of(key) in plan.sharded)
    }
    return frozenset(counted) if group is None else norm_share(counted, member=group.rank(), members=group.size())


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
