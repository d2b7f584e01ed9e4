"""The state of a job's ranks as the tensors of a checkpoint, and back: whole tensors by their names in the module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from distensor.core.errors import WorkerFailedError
from distensor.core.replica_shares import replica_shares
from distensor.optim.updater import state_layout
from distensor.program.calls import DTYPES, TORCH_DTYPES
from distensor.training.checkpoint_manifest import Group, TensorSpec
from distensor.training.checkpoint_shards import read_tensors, spec_of

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.core.layouts import WeightLayout
    from distensor.optim import OptimizerSpec
    from distensor.training.checkpoint_folder import Saved
    from distensor.training.pieces import MeshPieces
    from distensor.training.replies import Reply
    from distensor.training.snapshot_reading import SnapshotReader

    Kind: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


REPLICA = "."
"""Between a field and the number of the replica whose own it is; of the first one there is no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One tensor in the copy of one rank."""

    rank: int
    key: str
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """What one place of tp holds of a tensor: in the copy of one rank, or in flat parts, one behind the other."""

    spec: TensorSpec
    parts: tuple[Part, ...]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = tensors[0] if len(tensors) == 1 else torch.cat([each.view(-1) for each in tensors])
        return flat.view(self.spec.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A tensor of the model: one local one, or one of each place of tp, in their order."""

    locals: tuple[Local, ...]
    layout: WeightLayout | None

    @property
    def spec(self) -> TensorSpec:
        first = self.locals[0].spec
        return first if self.layout is None else TensorSpec(dtype=first.dtype, shape=self.layout.shape)

    @property
    def ranks(self) -> set[int]:
        return {part.rank for local in self.locals for part in local.parts}


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
        tensors = [local.join([self._read(part) for part in local.parts]) for local in whole.locals]
        return tensors[0] if whole.layout is None else whole.layout.join(tensors)

    def _read(self, part: Part) -> Tensor:
        return self._reader.read(part.rank, self._number, part.key, part.spec)

    def release(self) -> None:
        """The ranks may give their copies up."""
        ranks = {rank for group in self._wholes.values() for whole in group.values() for rank in whole.ranks}
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


def wanted_of(pieces: MeshPieces, optimizer: OptimizerSpec) -> dict[int, list[str]]:
    """Which weights ("stage/name") each rank has to copy: of what several keep the same, one; of what is cut, all. Of
    replicas that keep their own gradients, the others copy what of the state is their own."""
    found: dict[int, list[str]] = {}
    for replica in range(1 if optimizer.sparse is None else pieces.parallel.data_parallel):
        for rank, layout in pieces.replies(gradients=replica > 0, replica=replica).items():
            for holder in pieces.holders_of(rank):
                found[holder] = list(layout)
    return found


def wholes_of(
    pieces: MeshPieces, optimizer: OptimizerSpec, names: Sequence[str], replies: Sequence[Reply]
) -> dict[Group, dict[str, Whole]]:
    """What to read where: the weights `names` and the optimizer's tensors that the ranks say they have.

    Raises:
        WorkerFailedError: a rank names state that no such optimizer has, or parts that do not make a weight.
    """
    holders: dict[str, list[_Held]] = {}
    for rank, sent in pieces.replies(gradients=False).items():
        own = [replies[holder] for holder in pieces.holders_of(rank)]
        for key, kind in sent.items():
            holders.setdefault(key.partition("/")[2], []).append(_Held(replies=own, key=key, kind=kind))
    kinds = StateKinds(optimizer)
    found: dict[Group, dict[str, Whole]] = {Group.MODEL: {}, Group.OPTIMIZER: {}}
    for name in names:
        if held := holders.get(name):
            layout = pieces.layouts.get(name)
            held = held if layout is not None else held[:1]
            found[Group.MODEL][name] = Whole(locals=tuple(each.weight() for each in held), layout=layout)
            found[Group.OPTIMIZER].update(_state_of(name, held, layout, kinds))
    if optimizer.sparse is not None:
        for replica in range(1, pieces.parallel.data_parallel):
            found[Group.OPTIMIZER].update(_own_state_of(pieces, kinds, names, replies, replica))
    return found


def _own_state_of(
    pieces: MeshPieces, kinds: StateKinds, names: Sequence[str], replies: Sequence[Reply], replica: int
) -> Iterator[tuple[str, Whole]]:
    """The fields that `replica` has for itself, by "name/field.replica"."""
    holders: dict[str, list[_Held]] = {}
    for rank, sent in pieces.replies(gradients=True, replica=replica).items():
        for key, kind in sent.items():
            held = _Held(replies=[replies[rank]], key=key, kind=kind, whole=True)
            holders.setdefault(key.partition("/")[2], []).append(held)
    for name in names:
        if parts := holders.get(name):
            for field, whole in _state_of(name, parts, pieces.layouts.get(name), kinds):
                yield f"{field}{REPLICA}{replica}", whole


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A weight at one place of tp: the answers of the ranks that keep it, or a part of it each.

    `whole`: one rank that sends state alone, and never a part of it.
    """

    replies: Sequence[Reply]
    key: str
    kind: Kind
    whole: bool = False

    def weight(self) -> Local:
        return self._local(self.key, self.kind)

    def field(self, field: str, kind: Kind) -> Local:
        """A tensor of the optimizer: like the weight, or one number that all have."""
        if kind[1] == self.kind[1]:
            return self._local(f"{self.key}/{field}", kind)
        return Local(
            spec=_spec(kind), parts=(Part(rank=self.replies[0].rank, key=f"{self.key}/{field}", spec=_spec(kind)),)
        )

    def _local(self, key: str, kind: Kind) -> Local:
        spec = _spec(kind)
        if self.whole:
            return Local(spec=spec, parts=(Part(rank=self.replies[0].rank, key=key, spec=spec),))
        counts = [_elements(reply, self.key) for reply in self.replies]
        if counts[0] == math.prod(spec.shape):
            return Local(spec=spec, parts=(Part(rank=self.replies[0].rank, key=key, spec=spec),))
        if sum(counts) != math.prod(spec.shape):
            raise WorkerFailedError(f"{self.replies[0].who} and its replicas have {counts} elements of {self.key!r}")
        return Local(
            spec=spec,
            parts=tuple(
                Part(rank=reply.rank, key=key, spec=TensorSpec(dtype=spec.dtype, shape=(count,)))
                for reply, count in zip(self.replies, counts, strict=True)
                if count
            ),
        )

    def fields(self) -> list[str]:
        """The names of the optimizer's tensors of the weight; none for a frozen one."""
        reply = self.replies[0]
        fields: Any = reply.meta.get("fields")
        names = fields.get(self.key, []) if isinstance(fields, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise WorkerFailedError(f"{reply.who} answered fields={str(fields)[:100]}; expected names by weight")
        return names


def _spec(kind: Kind) -> TensorSpec:
    return TensorSpec(dtype=DTYPES[kind[0]], shape=kind[1])


def _elements(reply: Reply, key: str) -> int:
    elements: Any = reply.meta.get("elements")
    count = elements.get(key) if isinstance(elements, dict) else None
    if type(count) is not int or count < 0:
        raise WorkerFailedError(f"{reply.who} answered elements={str(elements)[:100]}; expected a number for {key!r}")
    return count


def _state_of(
    name: str, held: Sequence[_Held], layout: WeightLayout | None, state: StateKinds
) -> Iterator[tuple[str, Whole]]:
    for field in held[0].fields():
        kinds = [state(each.kind).get(field) for each in held]
        parts = [each.field(field, kind) for each, kind in zip(held, kinds, strict=True) if kind is not None]
        if len(parts) < len(held):
            raise WorkerFailedError(
                f"{held[0].replies[0].who} has {field[:50]!r} of {name!r}, which {state.name} has not"
            )
        cut = layout is not None and parts[0].spec.shape == held[0].kind[1]
        yield f"{name}/{field}", Whole(locals=tuple(parts) if cut else tuple(parts[:1]), layout=layout if cut else None)


def copy_seconds(replies: Sequence[Reply]) -> float:
    """How long the slowest rank took to copy. Raises WorkerFailedError for an answer without a number."""
    seconds = [reply.meta.get("copy_seconds") for reply in replies]
    for reply, found in zip(replies, seconds, strict=True):
        if not isinstance(found, float) or not 0 <= found < math.inf:
            raise WorkerFailedError(f"{reply.who} answered copy_seconds={str(found)[:50]}; expected a number")
    return max(float(found) for found in seconds if found is not None)


def state_for(pieces: MeshPieces, saved: Saved, rank: int) -> dict[str, Tensor]:
    """The optimizer's tensors that `rank` needs, cut as its weights are, by "stage/name/field".

    What each saved replica had for itself is shared out by `replica_shares`.
    """
    wanted: dict[str, list[int]] = {}
    for stage, program in pieces.programs_of(rank).items():
        for spec in program.parameters:
            if spec.requires_grad:
                wanted.setdefault(spec.name, []).append(stage)
    place = pieces.place(rank)
    kept = saved.manifest.specs(Group.OPTIMIZER)
    several = {_field_of(full)[:2] for full in kept if _field_of(full)[2]}
    count = 1 + max((_field_of(full)[2] for full in kept), default=0)
    shares = replica_shares(place.dp, of=pieces.parallel.data_parallel, saved=count)
    found: dict[str, Tensor] = {}

    def is_needed(full: str) -> bool:
        name, field, replica = _field_of(full)
        return name in wanted and ((name, field) not in several or replica in shares)

    for full_name, tensor in read_tensors(saved.path, saved.manifest, Group.OPTIMIZER, is_needed):
        name, field, replica = _field_of(full_name)
        layout = pieces.layouts.get(name)
        if layout is not None and tuple(tensor.shape) == layout.shape:
            tensor = layout.take(tensor, place.tp)
        if (name, field) in several and shares[replica] != 1.0:
            tensor = tensor * shares[replica]
        for stage in wanted[name]:
            key = f"{stage}/{name}/{field}"
            found[key] = found[key] + tensor if key in found else tensor
    return found


def _field_of(full_name: str) -> tuple[str, str, int]:
    """(weight, field, replica) of a tensor's name in a checkpoint; what replicas have in common is the first's."""
    name, _, field = full_name.rpartition("/")
    field, _, replica = field.partition(REPLICA)
    return name, field, int(replica) if replica.isdecimal() else 0


def state_problems(saved: Saved, optimizer: OptimizerSpec, parameters: Mapping[str, Tensor]) -> list[str]:
    """What keeps the checkpoint's optimizer state from being that of `optimizer` over `parameters`."""
    problems, kinds = [], StateKinds(optimizer)
    own = frozenset[str]() if optimizer.sparse is None else optimizer.sparse.own_fields
    for full_name, spec in saved.manifest.specs(Group.OPTIMIZER).items():
        name, field, replica = _field_of(full_name)
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            problems.append(f"{full_name!r}: no trainable parameter {name!r} here")
            continue
        kind = kinds((parameter.dtype, tuple(parameter.shape))).get(field)
        if kind is None or (replica and field not in own):
            problems.append(f"{full_name!r}: {optimizer.name} keeps no {field!r} with these options")
        elif (TORCH_DTYPES[spec.dtype], spec.shape) != kind:
            problems.append(f"{full_name!r} is {spec.dtype} {list(spec.shape)}; expected {kind[0]} {list(kind[1])}")
    return problems
