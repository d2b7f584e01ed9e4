"""All axes of the mesh against one process, the ranks as threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer


class TinyLM(nn.Module):
    """ids (rows, length) -> next-token loss, the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


STAGES = [["embed", "layers.0"], ["layers.1", "norm", "head"]]


def texts(count: int, rows: int = 5, length: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    batches = []
    for _ in range(count):
        ids = torch.randint(12, (rows, length), generator=generator)
        labels = ids.roll(-1, 1).clone()
        labels[0, 2:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def train_here(module: nn.Module, batches: list[Any], clip: float, norm_type: float) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip, norm_type)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(data_parallel=2, pipeline_parallel=2, order="dp-pp-tp-cp")],
    ids=ParallelConfig.describe,
)
def test_losses_norms_and_weights_equal_one_process(parallel: ParallelConfig, norm_type: Any) -> None:
    module, batches = TinyLM(), texts(5)
    reference = copy.deepcopy(module)
    losses, norms = train_here(reference, batches, 0.5, float(norm_type))
    stages = StageMapping(STAGES) if parallel.pipeline_parallel > 1 else None
    model = DistributedModel(module, stage_mapping=stages)
    with (
        thread_session(parallel.world_size) as session,
        Trainer(
            model, parallel=parallel, lr=1e-2, optimizer_options={"eps": 1e-6}, clip_norm=0.5, norm_type=norm_type,
            session=session, progress=False,
        ) as trainer,
    ):  # fmt: skip
        history = trainer.fit(batches)
        parity = trainer.check_parity(batches[0])
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in history.steps] == pytest.approx(norms, rel=1e-5)
    assert parity.max_relative_difference <= 1e-6
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], parameter, rtol=1e-5, atol=1e-6)
