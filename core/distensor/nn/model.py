"""DistributedModel: a module with the declarations of how it is cut, checked when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distensor.core.errors import UserError
from distensor.nn.mapping import StageMapping
from distensor.nn.sharding import Placement, ShardingSpec

if TYPE_CHECKING:
    from torch import nn


class DistributedModel:
    """Keeps the user's module; after training it holds the trained weights.

    Raises:
        StageMappingError: the stage mapping does not fit the module's parameters.
        ShardingError: the sharding spec does not fit them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage_mapping: StageMapping | None = None,
        tp_spec: ShardingSpec | None = None,
    ) -> None:
        if not hasattr(module, "named_parameters"):
            raise UserError(f"DistributedModel({type(module).__name__}): expected a torch.nn.Module")
        self.module = module
        self.stage_mapping = stage_mapping
        self.tp_spec = tp_spec
        names = [name for name, _ in module.named_parameters()]
        if not names:
            raise UserError(f"DistributedModel({type(module).__name__}): the module has no parameters to train")
        self.stages: dict[str, int] = (
            dict.fromkeys(names, 0)
            if stage_mapping is None
            else stage_mapping.resolve(names, _aliases(module), [name for name, _ in module.named_modules()])
        )
        shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        self.placements: dict[str, Placement] = {} if tp_spec is None else tp_spec.resolve(shapes)

    @property
    def stage_count(self) -> int:
        return 1 if self.stage_mapping is None else self.stage_mapping.stage_count


def _aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the first name."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    every = {name: first.setdefault(id(value), name) for name, value in named}
    return {name: known for name, known in every.items() if name != known}
