"""Clipping a tied GPT-2 over two stages: by the norm of the whole model here, by half of it with stock pipelining."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from group_pool import GroupPool
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer

RANKS, MICRO_BATCHES, ROWS, LENGTH, VOCABULARY = 2, 4, 8, 16, 61
EMBEDDING = "transformer.wte.weight"
STAGES = [
    ["transformer.wte", "transformer.wpe", "transformer.h.[0-1]"],
    ["transformer.h.[2-3]", "transformer.ln_f", "lm_head"],
]


def gpt2() -> Any:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(7)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


class First(nn.Module):
    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = whole.wte, whole.wpe, whole.h[:2]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return x


class Last(nn.Module):
    """A process of its own has a copy of the tied weight of its own."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.h, self.ln_f = whole.h[2:], whole.ln_f
        self.head = nn.Parameter(whole.wte.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return nn.functional.linear(self.ln_f(x), self.head)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def norm_of(module: nn.Module) -> float:
    """As everybody asks for it: what clip_grad_norm_ says."""
    return float(torch.nn.utils.clip_grad_norm_(module.parameters(), math.inf))


def stock_norm(rank: int) -> float:
    """The norm that a rank would clip by, after one pass of torch's 1F1B over gloo."""
    from torch.distributed import pipelining

    whole = gpt2().transformer
    module = First(whole) if rank == 0 else Last(whole)
    stage = pipelining.PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICRO_BATCHES, loss_fn=next_token)
    if rank == 0:
        schedule.step(ids())
    else:
        schedule.step(target=ids(), losses=[])
    return norm_of(module)


@pytest.fixture
def pool() -> Iterator[GroupPool]:
    made = GroupPool(RANKS)
    yield made
    made.close()


def clipped_here(module: Any, limit: float) -> float:
    """One step of SGD by gradients clipped to `limit`; the norm before."""
    module(input_ids=ids(), labels=ids()).loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), limit))
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    return norm


def test_the_norm_of_a_tied_gpt2_over_two_stages_is_that_of_one_process(pool: GroupPool) -> None:
    """NUM-05: with stock pipelining each stage knows its own part, and half of the tied weight's gradient; ours clips
    by the one norm that there is, on both ranks, and the clipped step is the same."""
    first, last = pool.run(stock_norm)
    module = gpt2()
    reference = copy.deepcopy(module)
    limit = 0.25
    true = clipped_here(reference, limit)
    print(f"\nnorms: stock stage 0 {first:.3f}, stage 1 {last:.3f}, one process {true:.3f}")
    assert true > limit, "there is something to clip"
    assert abs(first - true) > 0.02 * true
    assert abs(last - true) > 0.02 * true
    assert abs(math.hypot(first, last) - true) > 0.002 * true, "nor do the two together make it"
    model = DistributedModel(module, stage_mapping=StageMapping(STAGES))
    with (
        thread_session(RANKS) as session,
        Trainer(
            model,
            parallel=ParallelConfig(pipeline_parallel=RANKS),
            optimizer="sgd",
            lr=1.0,
            clip_norm=limit,
            micro_batches=MICRO_BATCHES,
            session=session,
            progress=False,
        ) as trainer,
    ):
        found = trainer.step({"input_ids": ids(), "labels": ids()})
        state = trainer.state_dict()
    assert found.grad_norm == pytest.approx(true, rel=1e-6)
    expected = dict(reference.named_parameters())
    assert state.keys() >= {EMBEDDING}
    for name, value in state.items():
        if name in expected:
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-6, atol=1e-7)
