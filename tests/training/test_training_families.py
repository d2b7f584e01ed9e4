"""Families of Hugging Face over tensor, pipeline and context parallel at once, cut as `suggest_sharding` proposes."""

from __future__ import annotations

import program_families as families
import pytest
import torch
from thread_mesh import thread_session

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Replicate, Shard, ShardingSpec, StageMapping, suggest_sharding
from distensor.program import run_module
from distensor.training import Trainer

PARALLEL = ParallelConfig(tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
NAMES = {"ShardingSpec": ShardingSpec, "Shard": Shard, "Replicate": Replicate}
QUICK = "llama"
SLOW = (
    "llama_tied", "llama_masked", "qwen2", "mistral", "mixtral", "gpt2", "opt", "olmo2", "gemma2", "gpt_neox", "bert",
)  # fmt: skip


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_family_on_three_axes_equals_one_process(name: str) -> None:
    """Gradients and loss of one batch, and the loss of another with other rows and an odd length."""
    family = families.FAMILIES[name]
    module, batch, other = family.build(), family.batch(*family.sizes[0]), family.batch(*family.sizes[1])
    spec = eval(suggest_sharding(module), NAMES)  # the text that a user pastes
    model = DistributedModel(module, stage_mapping=StageMapping(family.stages(2)), tp_spec=spec)
    with (
        thread_session(PARALLEL.world_size) as session,
        Trainer(
            model, parallel=PARALLEL, session=session, progress=False, micro_batches=2, loss=family.loss
        ) as trainer,
    ):
        parity = trainer.check_parity(batch)
        loss = trainer.evaluate([other])
    with torch.no_grad():
        expected = float(run_module(module.eval(), other, family.loss))
    assert parity.gradient_difference <= 1e-6
    assert parity.max_relative_difference <= 1e-5
    assert loss == pytest.approx(expected, rel=1e-5)
