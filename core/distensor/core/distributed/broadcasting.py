"""Giving every rank of a group what its lowest rank has."""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distensor.core.distributed.agreement import Call, agree, check_member, check_same, members, mismatch
from distensor.core.distributed.objects import decode, encode
from distensor.core.distributed.split import split_inputs_cp
from distensor.core.errors import ConfigError

_NONE, _TENSOR, _OBJECT = "None", "tensor", "object"
REPLICATE_DIM = "replicate"


class Mesh(Protocol):
    """The part of torch's DeviceMesh that is used here."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    def get_group(self, mesh_dim: str) -> dist.ProcessGroup: ...


def broadcast(item: Any, process_group: dist.ProcessGroup | None = None) -> Any:
    """What the lowest rank of the group passes: a tensor, None, or an object of plain data (see `objects.encode`).

    The other ranks pass something of the same kind, dtype and number of dims, or None; nothing of theirs is
    overwritten. The source gets its own object back, the others a new tensor without a gradient.

    Returns:
        `item` itself where `process_group` is None.

    Raises:
        GroupMismatchError: another kind, dtype or number of dims on some rank; on every rank.
        TransportTimeoutError: a rank did not take part, by its number.
    """
    if process_group is None:
        return item
    group = check_member(process_group)
    calls = agree(group, "broadcast", lambda: _described(item))
    source = _source(group)
    _check_placeholders(group, calls, source)
    spec = calls[source]
    if spec["kind"] == _TENSOR:
        return _send_tensor(item, spec, source, group)
    return decode(spec["value"].encode()) if spec["kind"] == _OBJECT else None


def broadcast_split_tensor(
    tensor: Tensor | None, seq_dim: int, process_group: dist.ProcessGroup | None = None
) -> Tensor | None:
    """`broadcast`, then this rank's part along `seq_dim`; `tensor` itself where `process_group` is None."""
    whole: Tensor | None = broadcast(tensor, process_group)
    return None if whole is None else split_inputs_cp(whole, seq_dim, process_group)


def broadcast_dtensor_model_states(model: nn.Module, mesh: Mesh) -> None:
    """Overwrite parameters and buffers with those of the first rank along the mesh's dim 'replicate', in place.

    Shards (DTensor) are sent as they are: ranks along 'replicate' hold the same shard.

    Raises:
        ConfigError: the mesh has no dim 'replicate'.
        GroupMismatchError: the models differ in names, shapes or dtypes; on every rank.
    """
    if REPLICATE_DIM not in (mesh.mesh_dim_names or ()):
        raise ConfigError(
            f"Mesh dimension {REPLICATE_DIM!r} does not exist; the mesh has mesh_dim_names={mesh.mesh_dim_names}"
        )
    group = check_member(mesh.get_group(REPLICATE_DIM))
    states = {
        name: get_local_tensor_if_dtensor(tensor).detach()
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
    }
    described = [[name, str(state.dtype), list(state.shape)] for name, state in states.items()]
    calls = agree(group, "broadcast_dtensor_model_states", lambda: {"states": described})
    check_same(group, calls, "states", "the models differ")
    for state in states.values():
        _overwrite(state, _source(group), group)


def get_local_tensor_if_dtensor(tensor: Any) -> Tensor:
    """A DTensor's local shard; any other tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _described(item: Any) -> Call:
    if item is None:
        return {"kind": _NONE}
    if isinstance(item, Tensor):
        return {"kind": _TENSOR, "dtype": str(item.dtype), "shape": list(item.shape)}
    return {"kind": _OBJECT, "value": encode(item).decode()}


def _source(group: dist.ProcessGroup) -> int:
    ranks = members(group)
    return ranks.index(min(ranks))


def _check_placeholders(group: dist.ProcessGroup, calls: list[dict[str, Any]], source: int) -> None:
    """None stands for whatever comes; anything else must fit what the source sends."""
    wanted = _fit(calls[source])
    if any(call["kind"] != _NONE and _fit(call) != wanted for call in calls):
        values = [f"{_words(call)}{' (the source)' if rank == source else ''}" for rank, call in enumerate(calls)]
        raise mismatch(group, "broadcast: kinds, dtypes or numbers of dims differ", values)


def _fit(call: Call) -> tuple[object, ...]:
    return call["kind"], call.get("dtype"), len(call.get("shape", ()))


def _words(call: Call) -> str:
    return f"{call['dtype']} of shape {tuple(call['shape'])}" if call["kind"] == _TENSOR else str(call["kind"])


def _send_tensor(item: Tensor | None, spec: Call, source: int, group: dist.ProcessGroup) -> Tensor:
    if item is not None and group.rank() == source:
        _send(item.detach().contiguous(), source, group)
        return item
    dtype = getattr(torch, spec["dtype"].removeprefix("torch."))
    buffer = torch.empty(spec["shape"], dtype=dtype, device=device_of(group) if item is None else item.device)
    _send(buffer, source, group)
    return buffer


def _overwrite(state: Tensor, source: int, group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        buffer = state.contiguous()
        _send(buffer, source, group)
        if buffer.data_ptr() != state.data_ptr():
            state.copy_(buffer)


def _send(buffer: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if buffer.numel() > 0:
        dist.broadcast(buffer, members(group)[source], group=group)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a backend wants its tensors: the current GPU for NCCL, the CPU for all others."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
