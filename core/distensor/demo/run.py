"""The main job: train on real processes, train again in this one, compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from distensor.core import ParallelConfig
from distensor.demo.data import TextBatches, load_tokens
from distensor.demo.model import ModelConfig, TinyLlama
from distensor.demo.report import MemberChange, Report
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer
from distensor.training.parity import relative_difference, relative_loss_difference
from distensor.training.results import History, StepResult

if TYPE_CHECKING:
    from torch import nn

    from distensor.training.sessions import Session

MICRO_CREDITS = 1_000_000
MICRO_CREDITS_A_UNIT = 1000
"""What the hub pays for one micro-batch through one rank; the report compares its books with this."""

CREDIT_SECONDS = 15.0
EPS = 1e-6
"""Larger than torch's 1e-8: below it Adam turns rounding noise in gradients near zero into steps of full size, and
the comparison with one process would measure Adam's taste instead of our exactness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    steps: int = 60
    rows: int = 16
    sequence: int = 64
    lr: float = 1e-3
    seed: int = 1
    nodes: tuple[str, ...] = ("atlas", "bolt")
    workers: int = 4
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(data_parallel=2, pipeline_parallel=2))
    model: ModelConfig = field(default_factory=ModelConfig)

    def batches(self) -> TextBatches:
        return TextBatches(
            tokens=load_tokens(), steps=self.steps, rows=self.rows, sequence=self.sequence, seed=self.seed
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshRun:
    """What the mesh did."""

    history: History
    weights: Mapping[str, torch.Tensor]
    bytes_per_link: Mapping[str, int]
    restarts: int
    credits: Mapping[str, float]
    credits_expected: float
    members: tuple[MemberChange, ...] = ()


def build_module(settings: DemoSettings) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return TinyLlama(settings.model)


def stage_mapping(settings: DemoSettings) -> StageMapping:
    """Two stages: the first half of the layers with the embedding, the second with the head."""
    half, last = settings.model.layers // 2, settings.model.layers - 1
    return StageMapping(
        [
            ["model.embed_tokens", f"model.layers.[0-{half - 1}]"],
            [f"model.layers.[{half}-{last}]", "model.norm", "lm_head"],
        ]
    )


def run_on_mesh(
    session: Session,
    module: nn.Module,
    settings: DemoSettings,
    *,
    progress: bool,
    on_step: Callable[[StepResult], None] | None = None,
) -> MeshRun:
    """Train `module` on the session's workers, then wait until the hub's books hold what was earned."""
    model = DistributedModel(module, stage_mapping=stage_mapping(settings))
    trainer = Trainer(
        model,
        parallel=settings.parallel,
        lr=settings.lr,
        optimizer_options={"eps": EPS},
        name="tiny-llama",
        progress=progress,
        session=session,
    )
    changes = [MemberChange(step=0, epoch=1, replicas=settings.parallel.data_parallel, seconds=0.0)]

    def note(result: StepResult) -> None:
        assert trainer.job is not None, "a step was taken"
        epoch = trainer.job.topology.epoch
        if epoch != changes[-1].epoch:
            seconds, replicas = result.seconds, trainer.job.replicas
            changes.append(MemberChange(step=result.step, epoch=epoch, replicas=replicas, seconds=seconds))
        if on_step is not None:
            on_step(result)

    history = trainer.fit(settings.batches(), on_step=note)
    job = trainer.job
    assert job is not None
    expected = job.units_done * MICRO_CREDITS_A_UNIT
    return MeshRun(
        history=history,
        weights={name: tensor.detach().clone() for name, tensor in module.named_parameters()},
        bytes_per_link={
            f"{_place(source)} -> {_place(target)}": count
            for (source, target), count in sorted(job.bytes_per_link().items())
        },
        restarts=job.restarts,
        credits=_wait_for_credits(session, expected),
        credits_expected=expected / MICRO_CREDITS,
        members=tuple(changes[1:]),
    )


def run_in_one_process(
    module: nn.Module, settings: DemoSettings, on_step: Callable[[int, float], None]
) -> tuple[list[float], float]:
    """The same training without us: (losses, seconds). `module` is trained in place.

    On one thread, as each worker runs: two threads that spin for each other crawl on a machine with other work.
    """
    from distensor.core import SYSTEM_CLOCK

    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.lr, eps=EPS)
    losses = []
    seconds = 0.0
    for number, batch in enumerate(settings.batches(), 1):
        started = SYSTEM_CLOCK.monotonic()
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        seconds += SYSTEM_CLOCK.monotonic() - started
        losses.append(float(loss.detach()))
        on_step(number, losses[-1])
    return losses, seconds


def compare(mesh: MeshRun, reference: nn.Module, losses: list[float], seconds: float, settings: DemoSettings) -> Report:
    tokens = mesh.history.tokens
    return Report(
        steps=len(mesh.history),
        parameters=sum(p.numel() for p in reference.parameters()),
        parallel=settings.parallel.describe(),
        loss_first=mesh.history.losses[0],
        loss_last=mesh.history.losses[-1],
        loss_difference=max(
            relative_loss_difference(ours, theirs) for ours, theirs in zip(mesh.history.losses, losses, strict=True)
        ),
        weight_difference=max(relative_difference(mesh.weights[name], p) for name, p in reference.named_parameters()),
        tokens_per_second=tokens / mesh.history.seconds,
        tokens_per_second_one_process=tokens / seconds,
        bytes_per_link=mesh.bytes_per_link,
        restarts=mesh.restarts,
        credits=mesh.credits,
        credits_expected=mesh.credits_expected,
        members=mesh.members,
    )


def two_modules(settings: DemoSettings) -> tuple[nn.Module, nn.Module]:
    """The same weights twice."""
    module = build_module(settings)
    return module, copy.deepcopy(module)


def _wait_for_credits(session: Session, expected_micro: int) -> dict[str, float]:
    """Each node's confirmed credits, as soon as the hub has matched all claims and receipts or the time is over."""
    deadline = session.clock.monotonic() + CREDIT_SECONDS
    while True:
        micro = {node.info.name: node.confirmed_micro for node in session.query_mesh().nodes}
        if sum(micro.values()) >= expected_micro or session.clock.monotonic() > deadline:
            return {name: amount / MICRO_CREDITS for name, amount in micro.items()}
        session.clock.sleep(0.2)


def _place(rank: int) -> str:
    return "trainer" if rank < 0 else f"rank {rank}"
