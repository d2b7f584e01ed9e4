"""The keywords of `Trainer` that name the optimizer, as a spec that fits the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError
from distensor.optim import OptimizerSpec, make_spec
from distensor.optim.sparse_spec import parse_sync_options

if TYPE_CHECKING:
    from distensor.nn import DistributedModel


def read_optimizer(
    model: DistributedModel,
    name: object,
    lr: float,
    options: Mapping[str, Any] | None,
    ema: float | None,
    sync: object = "allreduce",
    sync_options: Mapping[str, Any] | None = None,
) -> OptimizerSpec:
    """Raises ConfigError or UnsupportedOptionError naming the word that is wrong."""
    if not isinstance(name, str):
        raise ConfigError(f"optimizer={name!r}: expected a name such as 'adamw'")
    spec = make_spec(name, lr, options or {}, ema, dict(model.module.named_parameters()))
    return replace(spec, sparse=parse_sync_options(str(sync), sync_options))


def check_slices(spec: OptimizerSpec, parallel: ParallelConfig, sync: str) -> None:
    """Raise UnsupportedOptionError where an optimizer that needs whole weights would meet slices of them."""
    if sync == "zero3":
        spec.require_elementwise("sync='zero3'")
    if isinstance(parallel, ParallelConfig) and parallel.tensor_parallel > 1:
        spec.require_elementwise(f"tensor_parallel={parallel.tensor_parallel}")
