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
    for recipe in blocks()[1:3]:
        exec(compile(recipe, str(DOCS), "exec"), names)  # the point of this test
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in trained.state_dict().items())
    state = names["optimizer"].state[module.embed.weight]
    assert float(state["step"]) == 4
    saved = load_file(next((tmp_path / "step-00000004").glob("optimizer-*")))
    assert torch.equal(state["exp_avg"], saved["embed.weight/exp_avg"])
    names["optimizer"].zero_grad()
    module(torch.arange(6).view(3, 2)).backward()
    names["optimizer"].step()


def test_a_hugging_face_model_reads_its_checkpoint_as_it_is(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37, n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(37, (4, 6))
    with (
        thread_session(2) as session,
        Trainer(
            DistributedModel(GPT2LMHeadModel(config)), parallel=ParallelConfig(data_parallel=2), sync="zero3",
            checkpoint=tmp_path, session=session, progress=False,
        ) as trainer,
    ):  # fmt: skip
        trainer.fit([{"input_ids": ids, "labels": ids}] * 2)
        module = trainer.model.module
    names: dict[str, Any] = {"folder": tmp_path / "step-00000002", "module": module}
    exec(compile(blocks()[3], str(DOCS), "exec"), names)  # the point of this test
    found = names["again"].state_dict()
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    assert names["again"].lm_head.weight is names["again"].transformer.wte.weight
