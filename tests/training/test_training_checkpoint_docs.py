"""docs/checkpoints.md, word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel
from distensor.training import Trainer

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) * self.scale).square().mean()  # type: ignore[no-any-return]


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)


def test_the_recipes_read_a_checkpoint_without_us(tmp_path: Path) -> None:
    with (
        thread_session(1) as session,
        Trainer(
            DistributedModel(Tied()), parallel=ParallelConfig(), loss_weight="rows", lr=0.05,
            checkpoint=tmp_path, session=session, progress=False,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit([torch.arange(6).view(3, 2)] * 4)
        trained = trainer.model.module
    module = Tied()
    names: dict[str, Any] = {"folder": tmp_path / "step-00000004", "module": module}
    for recipe in blocks()[1:]:
        exec(compile(recipe, str(DOCS), "exec"), names)  # the point of this test
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in trained.state_dict().items())
    state = names["optimizer"].state[module.embed.weight]
    assert float(state["step"]) == 4
    saved = load_file(next((tmp_path / "step-00000004").glob("optimizer-*")))
    assert torch.equal(state["exp_avg"], saved["embed.weight/exp_avg"])
    names["optimizer"].zero_grad()
    module(torch.arange(6).view(3, 2)).backward()
    names["optimizer"].step()
