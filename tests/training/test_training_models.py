"""Models of Hugging Face over the mesh, ranks as threads, against the same training in one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from thread_mesh import ThreadSession, thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer


def gpt2() -> nn.Module:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=16, n_layer=4, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made: nn.Module = transformers.GPT2LMHeadModel(config).train()
    return made


STAGES = [
    ["transformer.wte", "transformer.wpe", "transformer.h.[0-1]"],
    ["transformer.h.[2-3]", "transformer.ln_f", "lm_head"],
]


def texts(count: int, rows: int = 4, length: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(61, (count, rows, length), generator=generator)
    return [{"input_ids": item, "labels": item} for item in ids]


def train_here(module: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def copies_of(session: ThreadSession, stages: int) -> list[Tensor]:
    """The tied embedding on its ranks, as they hold it now."""
    engines = session.connections[-1].engines
    names = ("0/transformer.wte.weight", f"{stages - 1}/transformer.wte.weight")
    found = [engine.state() for engine in engines]
    return [state[name].clone() for state in found for name in names if name in state]


def test_a_tied_gpt2_over_two_stages_stays_tied() -> None:
    module, batches = gpt2(), texts(5)
    reference = copy.deepcopy(module)
    losses, norms = train_here(reference, batches)
    model = DistributedModel(module, stage_mapping=StageMapping(STAGES))
    found: list[Any] = []
    with (
        thread_session(2) as session,
        Trainer(model, parallel=ParallelConfig(pipeline_parallel=2), lr=1e-3, session=session, progress=False) as t,
    ):
        for batch in batches:
            found.append(t.step(batch))
            first, last = copies_of(session, 2)
            assert torch.equal(first, last), "both copies hold the same bits after every step"
        state = t.state_dict()
        parity = t.check_parity(batches[0])
    assert [step.loss for step in found] == pytest.approx(losses, rel=1e-5)
    assert [step.grad_norm for step in found] == pytest.approx(norms, rel=1e-5)
    assert parity.max_relative_difference <= 1e-6
    assert "lm_head.weight" not in state, "a tied weight is exported once"
    fresh = gpt2()
    missing = fresh.load_state_dict(state, strict=False).missing_keys
    assert missing == ["lm_head.weight"], "the other name of the same tensor"
    assert torch.equal(fresh.get_parameter("lm_head.weight"), state["transformer.wte.weight"])
