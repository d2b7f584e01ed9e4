"""The state of a job's ranks as the tensors of a checkpoint, and back: whole tensors by their names in the module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from distensor.core.errors import WorkerFailedError
from distensor.optim.updater import state_layout
from distensor.program.calls import DTYPES, TORCH_DTYPES
from distensor.training.checkpoint_manifest import Group, TensorSpec
from distensor.training.checkpoint_shards import read_tensors, spec_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from distensor.core.layouts import WeightLayout
    from distensor.optim import OptimizerSpec
    from distensor.training.checkpoint_folder import Saved
    from distensor.training.pieces import MeshPieces
    from distensor.training.replies import Reply
    from distensor.training.snapshot_reading import SnapshotReader

    Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor in the copy of one rank."""

    rank: int
    key: str
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A tensor of the model: one part, or one of each rank of tp, in their order."""

    parts: tuple[Part, ...]
    layout: WeightLayout | None

    @property
    def spec(self) -> TensorSpec:
        first = self.parts[0].spec
        return first if self.layout is None else TensorSpec(dtype=first.dtype, shape=self.layout.shape)


class JobSnapshot:
    """Copies that all ranks made between the same two steps. `fetch` may be called from another thread."""

    def __init__(
        self,
        *,
        number: int,
        reader: SnapshotReader,
        wholes: Mapping[Group, Mapping[str, Whole]],
        module: Mapping[str, Tensor],
        copy_seconds: float,
    ) -> None:
        """What no rank holds, since the loss does not depend on it, is copied from `module`."""
        self._number = number
        self._reader = reader
        self._wholes = wholes
        held = wholes[Group.MODEL]
        self._local = {name: tensor.detach().clone() for name, tensor in module.items() if name not in held}
        self.copy_seconds = copy_seconds
        self.specs: dict[Group, dict[str, TensorSpec]] = {
            Group.MODEL: {name: held[name].spec if name in held else spec_of(module[name]) for name in module},
            Group.OPTIMIZER: {name: whole.spec for name, whole in wholes[Group.OPTIMIZER].items()},
        }

    def fetch(self, group: Group, name: str) -> Tensor:
        """Raises PeerLostError, TransportTimeoutError or WorkerFailedError."""
        if group is Group.MODEL and name in self._local:
            return self._local[name]
        whole = self._wholes[group][name]
        parts = [self._reader.read(part.rank, self._number, part.key, part.spec) for part in whole.parts]
        return parts[0] if whole.layout is None else whole.layout.join(parts)

    def release(self) -> None:
        """The ranks may give their copies up."""
        ranks = {part.rank for group in self._wholes.values() for whole in group.values() for part in whole.parts}
        for rank in sorted(ranks):
            self._reader.drop(rank, self._number)


class StateKinds:
    """What an optimizer keeps of a weight by dtype and shape; each kind of weight is tried once."""

    def __init__(self, optimizer: OptimizerSpec) -> None:
        self.name = optimizer.name
        self._optimizer = optimizer
        self._known: dict[Kind, Mapping[str, Kind]] = {}

    def __call__(self, weight: Kind) -> Mapping[str, Kind]:
        if weight not in self._known:
            self._known[weight] = state_layout(self._optimizer, *weight)
        return self._known[weight]


def wholes_of(
    pieces: MeshPieces, optimizer: OptimizerSpec, names: Sequence[str], replies: Sequence[Reply]
) -> dict[Group, dict[str, Whole]]:
    """What to read where: the weights `names` and the optimizer's tensors that the ranks say they have.

    Raises:
        WorkerFailedError: a rank names state that no such optimizer has.
    """
    holders: dict[str, list[tuple[Reply, str, Kind]]] = {}
    kinds = StateKinds(optimizer)
    by_rank = {reply.rank: reply for reply in replies}
    for rank, sent in pieces.replies(gradients=False).items():
        for key, kind in sent.items():
            holders.setdefault(key.partition("/")[2], []).append((by_rank[rank], key, kind))
    found: dict[Group, dict[str, Whole]] = {Group.MODEL: {}, Group.OPTIMIZER: {}}
    for name in names:
        held = holders.get(name)
        if held is not None:
            layout = pieces.layouts.get(name)
            held = held if layout is not None else held[:1]
            found[Group.MODEL][name] = _whole([(reply, key, kind) for reply, key, kind in held], layout)
            found[Group.OPTIMIZER].update(_state_of(name, held, layout, kinds))
    return found


def _whole(held: Sequence[tuple[Reply, str, Kind]], layout: WeightLayout | None) -> Whole:
    parts = [
        Part(rank=reply.rank, key=key, spec=TensorSpec(dtype=DTYPES[dtype], shape=shape))
        for reply, key, (dtype, shape) in held
    ]
    return Whole(parts=tuple(parts), layout=layout)


def _state_of(
    name: str, held: Sequence[tuple[Reply, str, Kind]], layout: WeightLayout | None, state: StateKinds
) -> Iterator[tuple[str, Whole]]:
    for field in _fields(*held[0][:2]):
        kinds = [state(kind).get(field) for _, _, kind in held]
        own = [(reply, f"{key}/{field}", kind) for (reply, key, _), kind in zip(held, kinds, strict=True) if kind]
        if len(own) < len(held):
            raise WorkerFailedError(f"{held[0][0].who} has {field[:50]!r} of {name!r}, which {state.name} has not")
        like_weight = layout is not None and all(
            kind is not None and kind[1] == weight[1] for kind, (_, _, weight) in zip(kinds, held, strict=True)
        )
        yield f"{name}/{field}", _whole(own, layout) if like_weight else _whole(own[:1], None)


def _fields(reply: Reply, key: str) -> list[str]:
    """The names of the optimizer's tensors of one weight; none for a frozen one."""
    fields: Any = reply.meta.get("fields")
    names = fields.get(key, []) if isinstance(fields, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WorkerFailedError(f"{reply.who} answered fields={str(fields)[:100]}; expected names by weight")
    return names


def copy_seconds(replies: Sequence[Reply]) -> float:
    """How long the slowest rank took to copy. Raises WorkerFailedError for an answer without a number."""
    seconds = [reply.meta.get("copy_seconds") for reply in replies]
    for reply, found in zip(replies, seconds, strict=True):
        if not isinstance(found, float) or not 0 <= found < math.inf:
            raise WorkerFailedError(f"{reply.who} answered copy_seconds={str(found)[:50]}; expected a number")
    return max(float(found) for found in seconds if found is not None)


def state_for(pieces: MeshPieces, saved: Saved, rank: int) -> dict[str, Tensor]:
    """The optimizer's tensors that `rank` needs, cut as its weights are, by "stage/name/field"."""
    wanted: dict[str, list[int]] = {}
    for stage, program in pieces.programs_of(rank).items():
        for spec in program.parameters:
            if spec.requires_grad:
                wanted.setdefault(spec.name, []).append(stage)
    place, found = pieces.place(rank), {}
    files = read_tensors(saved.path, saved.manifest, Group.OPTIMIZER, lambda full: full.rpartition("/")[0] in wanted)
    for full_name, tensor in files:
        name, _, field = full_name.rpartition("/")
        layout = pieces.layouts.get(name)
        if layout is not None and tuple(tensor.shape) == layout.shape:
            tensor = layout.take(tensor, place.tp)
        found.update({f"{stage}/{name}/{field}": tensor for stage in wanted[name]})
    return found


def state_problems(saved: Saved, optimizer: OptimizerSpec, parameters: Mapping[str, Tensor]) -> list[str]:
    """What keeps the checkpoint's optimizer state from being that of `optimizer` over `parameters`."""
    problems, kinds = [], StateKinds(optimizer)
    for full_name, spec in saved.manifest.specs(Group.OPTIMIZER).items():
        name, _, field = full_name.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            problems.append(f"{full_name!r}: no trainable parameter {name!r} here")
            continue
        kind = kinds((parameter.dtype, tuple(parameter.shape))).get(field)
        if kind is None:
            problems.append(f"{full_name!r}: {optimizer.name} keeps no {field!r} with these options")
        elif (TORCH_DTYPES[spec.dtype], spec.shape) != kind:
            problems.append(f"{full_name!r} is {spec.dtype} {list(spec.shape)}; expected {kind[0]} {list(kind[1])}")
    return problems
