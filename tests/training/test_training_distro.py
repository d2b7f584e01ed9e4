"""Replicas that exchange sparse updates, on every mesh, against one process for each replica."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mesh_models
import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.optim.distro import DeMo, DisTrOAdamW
from distensor.optim.distro.protection import row_factors
from distensor.training import Trainer

SPARSE = {"k": 4, "chunk": 16}
"""Tiles of 4 x 4, so that a small model has many and half of it has the same ones."""

EPS = 1e-2
"""With AdamW's own 1e-8 all entries of the first step are one, and rounding would choose among them."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(8, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h + self.down(self.up(h).tanh()))


SPEC = ShardingSpec({"up.weight": Shard(dim=0), "up.bias": Shard(dim=0), "down.weight": Shard(dim=1)})


def batches(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        x = torch.randn(rows, 8, generator=generator)
        made.append((x, x[:, :4].sin()))
    return made


def squared(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs - batch[1]).square().mean()


def model_for(parallel: ParallelConfig) -> DistributedModel:
    stages = [["first"], ["up", "down", "last"]] if parallel.pipeline_parallel == 2 else [["**"]]
    spec = SPEC if parallel.tensor_parallel > 1 else None
    return DistributedModel(Net(), stage_mapping=StageMapping(stages), tp_spec=spec)


def one_process_each(
    data: Sequence[Any], replicas: int, kind: Any, *, rows: Sequence[slice], clip: float | None = None
) -> tuple[Net, list[float]]:
    """The weights are the same everywhere, so one module serves all replicas in turn."""
    module = Net()
    given = {"weight_decay": 0.01, **({"eps": EPS} if kind is DisTrOAdamW else {})}
    optimizers = [kind(module.parameters(), lr=0.02, **given, **SPARSE) for _ in range(replicas)]
    losses = []
    for x, y in data:
        messages, total = [], 0.0
        for optimizer, part in zip(optimizers, rows, strict=True):
            module.zero_grad()
            loss = squared(module(x[part]), (x[part], y[part]))
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            messages.append(optimizer.propose())
            total += loss.item() * len(x[part])
        optimizers[0].apply(messages)
        losses.append(total / len(x))
    return module, losses


def fit(parallel: ParallelConfig, data: Sequence[Any], **options: Any) -> tuple[dict[str, Tensor], Any, float]:
    options = {
        "sync": "distro",
        "sync_options": SPARSE,
        "optimizer_options": {"eps": EPS},
        "lr": 0.02,
        "micro_batches": 2,
        **options,
    }
    with thread_session(parallel.world_size) as session:
        trainer = Trainer(model_for(parallel), parallel=parallel, loss=squared, session=session, **options)
        parity = trainer.check_parity(data[0])
        history = trainer.fit(data)
        state = trainer.state_dict()
        trainer.close()
    return state, history, parity.max_relative_difference


def worst(state: dict[str, Tensor], module: nn.Module) -> float:
    return max(float((state[name] - p.detach()).abs().max()) for name, p in module.named_parameters())


HALVES = (slice(0, 4), slice(4, 8))


FLAT, PIPED = ParallelConfig(data_parallel=2), ParallelConfig(data_parallel=2, pipeline_parallel=2)
CUT = ParallelConfig(data_parallel=2, tensor_parallel=2)
ALL = ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, order="pp-dp-tp-cp")


# DeMo not on cut weights: its cosines of tiles of up to 64 x 64 see the whole of matrices as small as these.
@pytest.mark.parametrize(
    ("sync", "kind", "parallel"),
    [
        *(("distro", DisTrOAdamW, parallel) for parallel in (FLAT, PIPED, CUT, ALL)),
        *(("demo", DeMo, parallel) for parallel in (FLAT, PIPED)),
    ],
)
def test_it_is_one_process_for_each_replica(sync: str, kind: Any, parallel: ParallelConfig) -> None:
    data = batches(6)
    reference, losses = one_process_each(data, 2, kind, rows=HALVES)
    state, history, difference = fit(parallel, data, sync=sync)
    assert history.losses == pytest.approx(losses, rel=1e-6)
    assert worst(state, reference) <= 1e-6
    assert difference <= 1e-6  # gradients of the whole batch are what one process has


def test_each_replica_is_clipped_by_its_own_norm() -> None:
    data = batches(4)
    reference, losses = one_process_each(data, 2, DisTrOAdamW, rows=HALVES, clip=0.05)
    state, history, _ = fit(ParallelConfig(data_parallel=2), data, clip_norm=0.05)
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert worst(state, reference) <= 1e-5
    assert all(math.isfinite(step.grad_norm) and step.grad_norm > 0.05 for step in history.steps)


def test_uneven_replicas_take_the_mean_over_their_own_rows() -> None:
    data = batches(4, rows=7)
    reference, losses = one_process_each(data, 2, DisTrOAdamW, rows=(slice(0, 4), slice(4, 7)))
    state, history, _ = fit(ParallelConfig(data_parallel=2), data)
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert worst(state, reference) <= 1e-5


def test_accumulated_batches_are_one_of_each_replica() -> None:
    """A replica takes its part of each of the two batches."""
    data = batches(6)
    joined = [
        tuple(torch.cat([one[i][:4], two[i][:4], one[i][4:], two[i][4:]]) for i in (0, 1))
        for one, two in zip(data[::2], data[1::2], strict=True)
    ]
    reference, losses = one_process_each(joined, 2, DisTrOAdamW, rows=(slice(0, 8), slice(8, 16)))
    state, history, _ = fit(FLAT, data, accumulate=2)
    assert history.losses == pytest.approx(losses, rel=1e-5)
    assert worst(state, reference) <= 1e-5


@pytest.mark.parametrize("options", [{}, {"sync": "diloco", "sync_options": {"every": 2}}], ids=["distro", "diloco"])
def test_bf16_and_an_average_of_the_weights(options: dict[str, Any]) -> None:
    """Within what bf16 rounds; the average follows the weights that all have in common."""
    data = batches(4)
    runs = []
    for precision in ("fp32", "bf16"):
        given = {"sync": "distro", "sync_options": SPARSE, **options}
        with thread_session(2) as session:
            trainer = Trainer(
                model_for(FLAT), parallel=FLAT, loss=squared, session=session, precision=precision, ema=0.5, lr=0.01,
                optimizer_options={"eps": EPS}, **given,
            )  # fmt: skip
            losses = trainer.fit(data).losses
            runs.append((losses, trainer.ema_state_dict(), trainer.state_dict()))
            trainer.close()
    (exact, averages, weights), (rounded, others, _) = runs
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded != exact
    for name, value in averages.items():
        assert float((value - others[name]).abs().max()) < 0.05
        assert 0 < float((value - weights[name]).abs().max()) < 0.2


def test_three_replicas_learn() -> None:
    data = batches(1, rows=12) * 40
    _, history, _ = fit(ParallelConfig(data_parallel=3), data)
    assert history.losses[-1] < 0.5 * history.losses[0]


@pytest.mark.parametrize("parallel", [FLAT, PIPED], ids=["flat", "piped"])
@pytest.mark.parametrize("sync", ["distro", "diloco"])
def test_a_replica_without_a_number_is_left_out_and_named(
    sync: str, parallel: ParallelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of its ranks hold parts of the model; both have nothing to send."""
    x, y = batches(1)[0]
    bad = x.clone()
    bad[5, 0] = math.inf
    options = {"sync": sync, "sync_options": {"every": 1} if sync == "diloco" else SPARSE}
    state, history, _ = fit(parallel, [(x, y), (bad, y), (x, y)], **options)
    assert [step.dropped for step in history.steps] == [(), (1,), ()]
    assert "step 2 is without replica 1 (rank" in caplog.text
    assert history.steps[1].tokens == 4 * 4
    assert all(torch.isfinite(value).all() for value in state.values())
    assert history.losses[2] < history.losses[0]


def test_numbers_that_nobody_has_stop_the_run() -> None:
    x, y = batches(1)[0]
    x = x * math.inf
    with pytest.raises(Exception, match="gradient norm nan; no rank has applied the update"):
        fit(FLAT, [*batches(1), (x, y)])


def test_what_replicas_send_each_other_is_counted_on_the_sockets() -> None:
    """A ring sends what a ring sends, the sparse one a part of it. The least of some steps, since a step that waits for
    a slow machine has signs of life of its links in it."""
    elements = sum(p.numel() for p in Net().parameters())
    least = {}
    for sync, options in (("allreduce", None), ("distro", SPARSE), ("diloco", {"every": 6})):
        _, history, _ = fit(FLAT, batches(6), sync=sync, sync_options=options)
        found = [step.replicas for step in history.steps[:5] if step.replicas is not None]
        assert len(found) == 5, sync
        assert all((each.dense, each.ring) == (4 * elements, 4 * elements) for each in found)
        assert all(min(each.up, each.down) > 0 for each in found)
        least[sync] = min(each.up for each in found)
    assert 1.0 <= least["allreduce"] / (4 * elements) <= 1.3
    assert least["distro"] < 0.2 * least["allreduce"]
    assert least["diloco"] < 0.1 * least["allreduce"]  # between two exchanges: the sums of the step
    _, history, _ = fit(ParallelConfig(), batches(1))
    assert history.steps[0].replicas is None


def test_parts_of_a_sequence_are_summed_before_anything_is_chosen() -> None:
    results = []
    for context in (1, 2):
        parallel = ParallelConfig(data_parallel=2, context_parallel=context)
        with thread_session(parallel.world_size) as session:
            trainer = Trainer(
                DistributedModel(copy.deepcopy(mesh_models.Decoder())),
                parallel=parallel, session=session, sync="distro", sync_options=SPARSE, lr=0.01, clip_norm=0.5,
                optimizer_options={"eps": EPS},
            )  # fmt: skip
            history = trainer.fit(mesh_models.texts(4))
            results.append((history, trainer.state_dict()))
            assert trainer.check_parity(mesh_models.texts(1)[0]).max_relative_difference <= 1e-5
            trainer.close()
    (one, weights), (two, others) = results
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    assert [s.grad_norm for s in two.steps] == pytest.approx([s.grad_norm for s in one.steps], rel=1e-4)
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) <= 1e-4


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"optimizer": "sgd"}, UnsupportedOptionError, "optimizer='adamw'"),
        ({"optimizer_options": {"amsgrad": True}}, UnsupportedOptionError, "'amsgrad'"),
        ({"sync_options": {"k": 0}}, ConfigError, "k = 0"),
        ({"sync_options": {"decay": 0.9}}, ConfigError, "'decay'"),
        ({"sync_options": {"k": True}}, ConfigError, "whole number"),
        ({"sync": "allreduce", "sync_options": {"k": 8}}, ConfigError, "takes none"),
        ({"sync": "zero3", "sync_options": {"k": 8}}, UnsupportedOptionError, "sync='zero3' with .* use sync='distro'"),
        ({"sync_options": {"topology": "star"}}, ConfigError, "'peers', 'aggregator', 'hybrid'"),
        ({"sync_options": {"topology": "hybrid"}}, ConfigError, "'hybrid' takes sites"),
        ({"sync_options": {"aggregators": ["casa"]}}, ConfigError, "only with topology='aggregator'"),
        ({"sync_options": {"topology": "hybrid", "sites": {"a": ["x"], "b": ["x"]}}}, ConfigError, "one site"),
        ({"sync_options": {"patience": 0}}, ConfigError, "positive number of seconds"),
        ({"sync": "diloco", "sync_options": {"every": 0}}, ConfigError, "at least 1"),
        ({"sync": "diloco", "sync_options": {"k": 8}}, ConfigError, "takes every, outer_lr, outer_momentum, average"),
        ({"sync": "diloco", "sync_options": {"average": "median"}}, ConfigError, "'mean' or 'trimmed' or 'centred'"),
        ({"sync": "sparseloco", "sync_options": {"outer_lr": -1.0}}, ConfigError, "a positive number"),
        ({"sync_options": {"clip_messages": 0.5}}, ConfigError, "at least 1, or None"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_job(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    given = {"parallel": ParallelConfig(data_parallel=2), "sync": "distro", **options}
    model = model_for(given["parallel"])
    with pytest.raises(kind, match=words):
        Trainer(model, loss=squared, **given)


def test_copies_of_a_tied_weight_stay_equal_where_rows_are_scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage judges the messages of its own ranks; the rows of the weight that both have are the same."""
    scaled = []

    def judge(updates: Any, largest: float | None) -> Any:
        found = row_factors(updates, largest)
        scaled.extend(float(scale.min()) for scales in found for scale in scales)
        return found

    monkeypatch.setattr("distensor.optim.distro.sparse.row_factors", judge)
    parallel = ParallelConfig(data_parallel=3, pipeline_parallel=2)
    with thread_session(parallel.world_size) as session:
        trainer = Trainer(
            DistributedModel(mesh_models.Decoder(), stage_mapping=StageMapping(mesh_models.STAGES)),
            parallel=parallel, session=session, sync="distro", sync_options={**SPARSE, "clip_messages": 1.0}, lr=0.01,
        )  # fmt: skip
        trainer.fit(mesh_models.texts(3))
        held = [dict(engine._weights.updated) for engine in session.connections[-1].engines]
        trainer.close()
    copies = [
        value for weights in held for key, value in weights.items() if key.endswith(("embed.weight", "head.weight"))
    ]
    assert len(copies) == parallel.world_size
    assert min(scaled) < 1.0
    assert all(torch.equal(copy_, copies[0]) for copy_ in copies)
