"""What the driver's commands say besides tensors, checked word by word: the driver is somebody else's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distensor.core.compute import Recompute
from distensor.core.errors import ProgramRejectedError
from distensor.core.numbers import is_finite
from distensor.core.schedules import Schedule
from distensor.optim import OptimizerSpec
from distensor.optim.clipping import NormType
from distensor.sync import Sync
from distensor.transport.driver import WITNESS_PREFIX

if TYPE_CHECKING:
    from torch import Tensor

MAX_MICRO_BATCHES = 1 << 16
MAX_NUMBER = 1 << 53
"""Whole numbers go on to the supervisor and the hub; these all hold exactly, in JSON too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedWeight:
    """One weight that several stages hold: (stage, its name in that stage), the first being the one that counts."""

    holders: tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What the driver's `load` command says besides programs and weights."""

    schedule: Schedule
    stages: int
    optimizer: OptimizerSpec
    clip_norm: float | None
    norm_type: NormType
    seed: int
    tied: tuple[TiedWeight, ...]
    sharded: frozenset[str]
    """Weights of which each rank of tp holds a part; of all others every rank holds the same."""
    recompute: Recompute
    sync: Sync = Sync.ALLREDUCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a step's pipeline runs: forwards ahead on each of its ranks (None: as the schedule has it), and whether the
    ranks measure themselves and their links."""

    warm_up: tuple[int, ...] | None = None
    measure: bool = False


AS_SCHEDULED = Pace()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrder:
    """What the driver's `step` command says besides the batch. The last two are only for people to read."""

    step: int
    lr: float
    pace: Pace = AS_SCHEDULED
    total_steps: int | None
    tokens_per_second: float | None
    sketch: bool = False
    """Whether the answer is to have a sketch of the gradients that this rank computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WitnessOrder:
    """To compute beforehand what another replica is to compute in this step, by micro-batches."""

    replica: int
    batches: list[dict[str, Tensor]]


def parse_plan(meta: Mapping[str, Any]) -> JobPlan:
    """Raises ProgramRejectedError for what is not a plan."""
    clip = meta.get("clip_norm")
    try:
        return JobPlan(
            schedule=Schedule(meta["schedule"]),
            stages=_whole(meta, "stages", at_least=1),
            optimizer=OptimizerSpec.from_json(meta["optimizer"]),
            clip_norm=None if clip is None else _number(meta, "clip_norm"),
            norm_type=NormType(meta["norm_type"]),
            seed=_whole(meta, "seed"),
            tied=tuple(TiedWeight(holders=tuple(_holder(item) for item in group)) for group in meta["tied"]),
            sharded=frozenset(_names(meta, "sharded")),
            recompute=Recompute(meta["recompute"]),
            sync=Sync(meta["sync"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProgramRejectedError(f"load command: {error!r} in {str(dict(meta))[:300]}") from error


def _holder(item: Any) -> tuple[int, str]:
    stage, name = item
    if not isinstance(stage, int) or not isinstance(name, str):
        raise TypeError(f"tied weight {item!r}: expected [stage, name]")
    return stage, name


def _names(meta: Mapping[str, Any], key: str) -> list[str]:
    value = meta.get(key)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ProgramRejectedError(f"{key}={str(value)[:100]}: expected a list of names")
    return value


def parse_number(meta: Mapping[str, Any], key: str) -> int:
    """A whole number from 0; nothing said is 0. Raises ProgramRejectedError."""
    return _whole(meta, key) if key in meta else 0


def parse_wanted(meta: Mapping[str, Any]) -> list[str]:
    """The tensors ("stage/name") that the driver asks for; nothing said is none. Raises ProgramRejectedError."""
    return _names(meta, "wanted") if "wanted" in meta else []


def parse_step(meta: Mapping[str, Any]) -> StepOrder:
    """Raises ProgramRejectedError naming the field that is wrong."""
    total, speed = meta.get("total_steps"), meta.get("tokens_per_second")
    return StepOrder(
        step=_whole(meta, "step", at_least=1),
        lr=_number(meta, "lr"),
        pace=_pace(meta),
        total_steps=None if total is None else _whole(meta, "total_steps"),
        tokens_per_second=None if speed is None else _number(meta, "tokens_per_second"),
        sketch=meta.get("sketch") is True,
    )


def parse_witness(meta: Mapping[str, Any], tensors: dict[str, Tensor]) -> WitnessOrder | None:
    """The part of a step command that is about another replica, whose batch is taken out of `tensors`; None where
    there is none. Raises ProgramRejectedError."""
    names = [key for key in tensors if key.startswith(WITNESS_PREFIX)]
    own = {key.removeprefix(WITNESS_PREFIX): tensors.pop(key) for key in names}
    words = meta.get("witness")
    if words is None:
        return None
    if not isinstance(words, dict):
        raise ProgramRejectedError(f"witness={str(words)[:100]}: expected a replica and a number of micro-batches")
    return WitnessOrder(replica=_whole(words, "replica"), batches=split_batches(words, own))


def _pace(meta: Mapping[str, Any]) -> Pace:
    depths, measure = meta.get("warm_up"), meta.get("measure", False)
    good = depths is None or (isinstance(depths, list) and all(type(depth) is int for depth in depths))
    if not good or not isinstance(measure, bool):
        raise ProgramRejectedError(
            f"warm_up={str(depths)[:100]}, measure={str(measure)[:100]}: expected a list of whole numbers or null, and "
            "true or false"
        )
    return Pace(warm_up=None if depths is None else tuple(depths), measure=measure)


def _whole(meta: Mapping[str, Any], key: str, *, at_least: int = 0) -> int:
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= MAX_NUMBER:
        raise ProgramRejectedError(f"{key}={value!r}: expected a whole number from {at_least} to {MAX_NUMBER}")
    return value


def _number(meta: Mapping[str, Any], key: str) -> float:
    value = meta.get(key)
    if not is_finite(value) or value < 0:
        raise ProgramRejectedError(f"{key}={str(value)[:100]}: expected a finite number of at least 0")
    return float(value)


def split_batches(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors named "micro/name" as one dict per micro-batch. Raises ProgramRejectedError for other names."""
    count = _whole(meta, "micro_batches")
    if count > MAX_MICRO_BATCHES:
        raise ProgramRejectedError(f"micro_batches={count}: expected at most {MAX_MICRO_BATCHES}")
    batches: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        micro, _, name = key.partition("/")
        index = _index(micro)
        if index is None or index >= count:
            raise ProgramRejectedError(f"batch tensor {key[:100]!r}: expected a micro-batch below {count} and a name")
        batches[index][name] = tensor.detach()
    return batches


def split_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[int, bytes], dict[int, dict[str, Tensor]]]:
    """Programs and weights by stage, from "program/STAGE" and "weight/STAGE/NAME".

    Raises ProgramRejectedError for other names.
    """
    programs: dict[int, bytes] = {}
    weights: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        text, _, name = rest.partition("/")
        stage = _index(text)
        if stage is None or kind not in ("program", "weight"):
            raise ProgramRejectedError(f"load has a tensor {key[:100]!r}: expected program/STAGE or weight/STAGE/NAME")
        if kind == "weight":
            weights.setdefault(stage, {})[name] = tensor.detach()
        elif tensor.dtype is not torch.uint8 or tensor.dim() != 1:
            raise ProgramRejectedError(f"{key} is {tensor.dtype} of {tuple(tensor.shape)}: expected bytes in one dim")
        else:
            programs[stage] = tensor.numpy().tobytes()
    return programs, weights


def _index(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def chosen(named: Mapping[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Those of `named` that are wanted. Raises ProgramRejectedError for one that is not among them."""
    unknown = [name for name in wanted if name not in named]
    if unknown:
        raise ProgramRejectedError(f"asked for {unknown[0][:100]!r}, which this rank does not hold")
    return {name: named[name] for name in wanted}
