"""What every member of a group is about to do, known to all of them before a tensor moves.

A collective whose members disagree reinterprets bits, waits for ever or aborts the process, depending on the backend.
So each helper first tells the others in a few bytes of JSON what it was called with. The bytes travel through the
store of the group (one round of set, wait, get: about 0.1 ms on one machine, and no device is synchronised); a backend
whose store is local to the process, as our own is, gathers them as a tensor.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.errors import ConfigError, GroupMismatchError, TransportTimeoutError, UserError

OWN_BACKEND = "distensor"

Call: TypeAlias = Mapping[str, Any]
"""What one member was called with: JSON values by name."""


@dataclass(slots=True)
class _Memory:
    """What this process remembers of a group."""

    sequence: int = 0
    timeout: timedelta | None = None


@dataclass(slots=True)
class _Memories:
    """By group object, not by name: a new group may bear the name of a destroyed one."""

    by_group: weakref.WeakKeyDictionary[Any, _Memory] = field(default_factory=weakref.WeakKeyDictionary)

    def of(self, group: dist.ProcessGroup) -> _Memory:
        return self.by_group.setdefault(group, _Memory())


_memories = _Memories()


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long `agree` waits for the members of `group`; without it, as long as the group's store does."""
    _memories.of(group).timeout = timeout


def check_member(group: object) -> dist.ProcessGroup:
    """`group`, if this process belongs to it.

    Raises:
        ConfigError: torch.distributed is not initialised, or `group` is no group of this process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised; call dist_init() or init_process_group() first")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group={group!r}: expected a process group that this rank ({dist.get_rank()}) belongs to, or None for a "
            "disabled axis"
        )
    return group


def members(group: dist.ProcessGroup) -> list[int]:
    """The world ranks of a group, by their rank in it."""
    return dist.get_process_group_ranks(group)


def agree(group: dist.ProcessGroup, name: str, describe: Callable[[], Call]) -> list[dict[str, Any]]:
    """What every member was called with, by its rank in the group. Every member must take part.

    Args:
        name: the helper that was called.
        describe: what it was called with. Where that raises a UserError, the members hear of it and none goes on.

    Raises:
        UserError: from `describe`.
        GroupMismatchError: the members called different helpers, or one of them cannot go on; on every one of them.
        TransportTimeoutError: members that did not take part in time, by their world ranks.
    """
    problem: UserError | None = None
    try:
        own: dict[str, Any] = {"call": name, **describe()}
    except UserError as error:
        own, problem = {"call": name, "problem": str(error)}, error
    encoded = json.dumps(own).encode()
    answers = [encoded] if group.size() == 1 else _exchange(group, encoded, name)
    if problem is not None:
        raise problem
    calls: list[dict[str, Any]] = [json.loads(answer) for answer in answers]
    check_same(group, calls, "call", "different functions were called")
    check_same(group, calls, "problem", "it failed on some ranks")
    return calls


def check_same(group: dist.ProcessGroup, calls: Sequence[Call], name: str, problem: str) -> None:
    """Raise GroupMismatchError, listing the values by rank, unless all members have the same one under `name`."""
    values = [call.get(name) for call in calls]
    if any(value != values[0] for value in values):
        raise mismatch(group, f"{calls[0]['call']}: {problem}", values)


def mismatch(group: dist.ProcessGroup, problem: str, values: Sequence[object]) -> GroupMismatchError:
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in zip(members(group), values, strict=True))
    return GroupMismatchError(f"{problem}; every rank must pass the same. {listed}")


def _exchange(group: dist.ProcessGroup, own: bytes, what: str) -> list[bytes]:
    if dist.get_backend(group) == OWN_BACKEND:
        return _gathered(group, own)
    return _through_store(group, own, what)


def _through_store(group: dist.ProcessGroup, own: bytes, what: str) -> list[bytes]:
    memory, store, me = _memories.of(group), group.get_group_store(), group.rank()
    memory.sequence += 1
    keys = [_key(memory.sequence, rank) for rank in range(group.size())]
    store.set(keys[me], own.decode())
    timeout: timedelta = memory.timeout or store.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, key in zip(members(group), keys, strict=True) if not store.check([key])]
        raise TransportTimeoutError(
            f"{what}: {named(missing)} of the group {members(group)} did not take part within "
            f"{timeout.total_seconds():g} s"
        ) from None
    answers: list[bytes] = store.multi_get(keys)
    # Whoever has posted this round has read the one before: our own entry of it is needed no more.
    store.delete_key(_key(memory.sequence - 1, me))
    return answers


def _key(sequence: int, rank: int) -> str:
    return f"distensor/agree/{sequence}/{rank}"


def named(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 2, 3'."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gathered(group: dist.ProcessGroup, own: bytes) -> list[bytes]:
    lengths = _all_gather(group, torch.tensor([len(own)]))
    sizes = [int(length) for length in lengths]
    padded = torch.frombuffer(bytearray(own.ljust(max(sizes))), dtype=torch.uint8)
    rows = _all_gather(group, padded)
    return [bytes(row.tolist())[:size] for row, size in zip(rows, sizes, strict=True)]


def _all_gather(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(rows, tensor, group=group)
    return rows
