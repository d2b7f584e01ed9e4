"""DistributedModel checks its declarations when it is made; the package needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from distensor.core.errors import ShardingError, StageMappingError, UserError
from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec, StageMapping


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def test_keeps_the_module_and_counts_stages() -> None:
    module = _module()
    model = DistributedModel(module, stage_mapping=StageMapping([["0"], ["2"]]))
    assert model.module is module
    assert model.stage_count == 2
    assert model.stages == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}


def test_without_a_mapping_there_is_one_stage() -> None:
    model = DistributedModel(_module())
    assert model.stage_count == 1
    assert set(model.stages.values()) == {0}


def test_a_stage_may_be_a_module_without_parameters() -> None:
    model = DistributedModel(_module(), stage_mapping=StageMapping([["0"], ["1"], ["2"]]))
    assert model.stages == {"0.weight": 0, "0.bias": 0, "1": 1, "2.weight": 2, "2.bias": 2}
    with pytest.raises(StageMappingError, match=r"'1' is in stage 0 .* and stage 1"):
        DistributedModel(_module(), stage_mapping=StageMapping([["0", "1"], ["1", "2"]]))


def test_mistakes_show_at_once() -> None:
    with pytest.raises(StageMappingError, match=r"'7' matches no parameter"):
        DistributedModel(_module(), stage_mapping=StageMapping([["0"], ["7", "2"]]))
    with pytest.raises(ShardingError, match="has 1 dims"):
        DistributedModel(_module(), tp_spec=ShardingSpec({"0.bias": Shard(dim=1)}))


def test_placements_follow_the_spec() -> None:
    spec = ShardingSpec({"0.weight": Shard(dim=0), "2": Replicate()})
    model = DistributedModel(_module(), tp_spec=spec)
    assert model.placements["0.weight"] == Shard(dim=0)
    assert model.placements["2.bias"] == Replicate()


def test_tied_names_are_found() -> None:
    module = _module()
    module[2] = nn.Linear(3, 2, bias=False)
    module[2].weight = module[0].weight
    model = DistributedModel(module, stage_mapping=StageMapping([["0"], ["2"]]))
    assert model.stages == {"0.weight": 0, "0.bias": 0, "2.weight": 1}


@pytest.mark.parametrize("module", [None, "model", object()])
def test_what_is_no_module_is_refused(module: object) -> None:
    with pytest.raises(UserError, match=r"torch\.nn\.Module"):
        DistributedModel(module)  # type: ignore[arg-type]


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no parameters"):
        DistributedModel(nn.ReLU())


def test_the_package_needs_no_torch() -> None:
    code = "import sys, distensor.nn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
