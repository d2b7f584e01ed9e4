"""Saved under one layout, resumed under another, the ranks as threads: the same losses, the same state to the bit."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from thread_mesh import thread_session
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.program.values import DType
from distensor.training import Trainer, checkpoint_writing
from distensor.training.checkpoint_folder import CheckpointFolder
from distensor.training.checkpoint_manifest import Group
from distensor.training.checkpoint_model import fill_model, model_tensors

VOCABULARY = 131
SHARDING = ShardingSpec({"embed.weight": Shard(dim=0), "layers.*.weight": Shard(dim=0), "layers.*.bias": Shard(dim=0)})
STAGES = [["embed", "layers.0"], ["layers.1", "norm", "head"]]


class OddLM(nn.Module):
    """A vocabulary that no number of ranks divides; a frozen layer, a buffer, and a weight that the loss never sees."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[0].requires_grad_(False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.randn(6))
        self.unused = nn.Linear(2, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


def texts(count: int, rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(VOCABULARY, (rows, 5), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each.roll(-1, 1)} for each in ids]


BATCHES = texts(6)
"""A global batch of 8 rows, whatever the number of replicas."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sync: str = "allreduce"
    order: str = "tp-cp-pp-dp"

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}-pp{self.pp}-cp{self.cp}-{self.sync}-{self.order[:2]}"

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            data_parallel=self.dp,
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
            context_parallel=self.cp,
            order=self.order,
        )


def trainer_for(session: Any, layout: Layout, folder: Path, seed: int = 5, **options: Any) -> Trainer:
    mapping = StageMapping([[*STAGES[0]], [*STAGES[1], "gain", "unused"]]) if layout.pp > 1 else None
    options = {"lr": 1e-2, "ema": 0.9, "clip_norm": 0.5, "optimizer_options": {"eps": 1e-6}, **options}
    return Trainer(
        DistributedModel(OddLM(seed), stage_mapping=mapping, tp_spec=SHARDING),
        parallel=layout.parallel,
        sync=layout.sync,
        checkpoint=folder,
        checkpoint_keep=5,
        session=session,
        progress=False,
        **options,
    )


def digests(path: Path) -> dict[str, str]:
    """Of everything that a layout must not change."""
    saved = next(each for each in CheckpointFolder(path.parent).complete() if each.path == path)
    return {name: file.sha256 for name, file in saved.manifest.files.items() if name.startswith(("model", "optimizer"))}


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    losses: list[float]
    digests: dict[str, str]


def saved_at_three(layout: Layout, folder: Path) -> Run:
    """Six steps, saved after the third."""
    with thread_session(layout.parallel.world_size) as session, trainer_for(session, layout, folder) as trainer:
        for batch in BATCHES[:3]:
            trainer.step(batch)
        path = trainer.save_checkpoint()
        return Run(folder=folder, losses=[trainer.step(b).loss for b in BATCHES[3:]], digests=digests(path))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Run]:
    return {layout: saved_at_three(layout, tmp_path_factory.mktemp("run")) for layout in SAVED}


PLAIN, PIPED, ZERO2, ZERO3 = Layout(dp=2), Layout(dp=2, pp=2), Layout(dp=2, sync="zero3"), Layout(dp=3, sync="zero3")
TENSOR, TENSOR_ZERO, CONTEXT = Layout(tp=2), Layout(dp=2, tp=2, sync="zero3"), Layout(cp=2)
ALL_ZERO = Layout(dp=2, cp=2, tp=2, sync="zero3", order="dp-tp-pp-cp")
SAVED = (PIPED, ZERO2, ZERO3, TENSOR, TENSOR_ZERO, ALL_ZERO)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (PIPED, PIPED),
        (PIPED, Layout()),
        (PIPED, Layout(dp=4)),
        (PIPED, Layout(dp=2, pp=2, sync="zero3")),
        (ZERO2, ZERO2),
        (ZERO2, Layout()),
        (ZERO2, ZERO3),
        (ZERO2, Layout(dp=4, sync="zero3")),
        (ZERO3, ZERO3),
        (ZERO3, PLAIN),
        (TENSOR, TENSOR),
        (TENSOR, Layout(tp=3)),
        (TENSOR, ZERO3),
        (TENSOR_ZERO, TENSOR_ZERO),
        (TENSOR_ZERO, PIPED),
        (ZERO2, Layout(dp=2, tp=2, pp=2)),
        (ZERO2, CONTEXT),
        (ALL_ZERO, ALL_ZERO),
        (ALL_ZERO, PLAIN),
    ],
    ids=str,
)
def test_ckp_03_04_11_a_run_goes_on_under_any_layout(
    runs: dict[Layout, Run], tmp_path: Path, saved: Layout, resumed: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    run, folder = runs[saved], tmp_path / "run"
    shutil.copytree(run.folder, folder)
    with (
        thread_session(resumed.parallel.world_size) as session,
        trainer_for(session, resumed, folder, seed=77) as trainer,
    ):
        assert trainer.resume(3) == 3
        trainer.step(BATCHES[3])
        trainer.resume(3)
        assert digests(trainer.save_checkpoint()) == run.digests, "gathered again, every bit is the same"
        losses = [trainer.step(batch).loss for batch in BATCHES[3:]]
    assert caplog.text == "", "no setting that matters has changed"
    assert losses == (run.losses if resumed == saved else pytest.approx(run.losses, rel=1e-5))


def test_ckp_07_frozen_weights_buffers_and_unused_weights_are_in_the_checkpoint(runs: dict[Layout, Run]) -> None:
    saved = CheckpointFolder(runs[ZERO2].folder).find(3)
    assert saved is not None
    other, original = OddLM(seed=77), OddLM()
    fill_model(other, saved)
    found, expected = model_tensors(other).tensors, model_tensors(original).tensors
    for name in ("layers.0.weight", "layers.0.bias", "shift", "unused.weight", "unused.bias", "gain"):
        assert torch.equal(found[name], expected[name])
    assert not torch.equal(found["embed.weight"], expected["embed.weight"]), "that one was trained"


def test_weights_in_half_precision_go_on_from_their_masters(tmp_path: Path) -> None:
    """What is rounded into a bfloat16 weight is kept in full beside it."""
    with thread_session(1) as session:

        def trainer(seed: int) -> Trainer:
            return Trainer(
                DistributedModel(OddLM(seed).bfloat16()), parallel=ParallelConfig(), lr=1e-4, checkpoint=tmp_path,
                session=session, progress=False,
            )  # fmt: skip

        with trainer(5) as first:
            for batch in BATCHES[:3]:
                first.step(batch)
            path = first.save_checkpoint()
            losses = [first.step(batch).loss for batch in BATCHES[3:]]
        with trainer(77) as second:
            second.resume()
            assert [second.step(batch).loss for batch in BATCHES[3:]] == losses
    state = CheckpointFolder(tmp_path).complete()[0].manifest.tensors[Group.OPTIMIZER]
    assert path == CheckpointFolder(tmp_path).complete()[0].path
    assert state["embed.weight/master"].spec.dtype is DType.FLOAT32


# -- fit ---------------------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Tensor]]):
    """48 rows; which were asked for is written down."""

    def __init__(self) -> None:
        self.ids = torch.randint(VOCABULARY, (48, 5), generator=torch.Generator().manual_seed(1))
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {"input_ids": self.ids[index], "labels": self.ids[index].roll(-1)}


def loader(seed: int) -> DataLoader[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return DataLoader(Rows(), batch_size=8, shuffle=True)


def asked(data: DataLoader[Any]) -> list[int]:
    assert isinstance(data.dataset, Rows)
    return data.dataset.asked


class Interrupted(Exception):  # noqa: N818 - no error of anybody
    """Ends a fit in the middle, as a crash would."""


class Dropping(OddLM):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embed(input_ids), 0.2, self.training)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def dropping(session: Any, folder: Path, **options: Any) -> Trainer:
    return Trainer(
        DistributedModel(Dropping()), parallel=ParallelConfig(data_parallel=2), lr=1e-2, accumulate=2, seed=9,
        lr_schedule="cosine", checkpoint=folder, session=session, progress=False, **options,
    )  # fmt: skip


def test_dat_03_an_interrupted_fit_goes_on_with_the_rows_rates_and_masks_of_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """Two passes of six batches, two batches a step, stopped after step 2: in the middle of the first pass."""
    with thread_session(2) as session:
        with dropping(session, tmp_path / "whole") as trainer:
            data = loader(3)
            whole = trainer.fit(data, epochs=2)
        rows = asked(data)

        def stop(result: Any) -> None:
            if result.step == 2:
                trainer.gradients(BATCHES[0])  # other commands shift no mask
                trainer.evaluate(BATCHES[:1])
                trainer.save_checkpoint()
                raise Interrupted

        with pytest.raises(Interrupted), dropping(session, tmp_path / "part") as trainer:
            trainer.fit(loader(3), epochs=2, on_step=stop)
        with dropping(session, tmp_path / "part") as trainer:
            data = loader(99)
            rest = trainer.fit(data, epochs=2, resume=True)
            again = trainer.fit(data, epochs=2, resume=True)
        with dropping(session, tmp_path / "part") as trainer:
            over = trainer.fit(loader(1), epochs=2, resume=True)
            more = trainer.fit(loader(1), epochs=3, resume=True)
    assert [step.step for step in rest.steps] == [3, 4, 5, 6]
    assert rest.losses == whole.losses[2:]
    assert [step.lr for step in rest.steps] == [step.lr for step in whole.steps[2:]]
    assert asked(data)[: len(rows)] == rows, "every row once a pass, in the order of the uninterrupted run"
    assert len(again) == len(over) == 0, "that fit was finished"
    assert [step.step for step in more.steps] == [7, 8, 9]


def test_max_steps_counts_from_the_beginning_of_the_interrupted_fit(tmp_path: Path) -> None:
    with thread_session(1) as session:
        layout = Layout()
        with trainer_for(session, layout, tmp_path) as trainer:
            assert len(trainer.fit(BATCHES, max_steps=2)) == 2
            assert trainer.fit(BATCHES, max_steps=2, resume=True).steps == []
        with trainer_for(session, layout, tmp_path) as trainer:
            assert [step.step for step in trainer.fit(BATCHES, max_steps=5, resume=True).steps] == [3, 4, 5]
    assert [saved.manifest.step for saved in CheckpointFolder(tmp_path).complete()] == [2, 5], "at each end"


# -- in the background -------------------------------------------------------------------------------------------


def test_training_goes_on_while_the_disk_is_busy_and_what_is_saved_is_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), checkpoint_writing.write_tensors

    def slow(path: Path, tensors: Any) -> Any:
        assert go_on.wait(30)
        return write(path, tensors)

    with thread_session(2) as session, trainer_for(session, ZERO2, tmp_path / "a", checkpoint_every=2) as trainer:
        monkeypatch.setattr(checkpoint_writing, "write_tensors", slow)
        for batch in BATCHES[:5]:
            trainer.step(batch)
        assert list((tmp_path / "a").glob("*/manifest.json")) == [], "step 2 is still being written"
        go_on.set()
        trainer.close()
    monkeypatch.undo()
    with thread_session(2) as session, trainer_for(session, ZERO2, tmp_path / "b") as trainer:
        for batch in BATCHES[:2]:
            trainer.step(batch)
        expected = digests(trainer.save_checkpoint())
    (saved,) = CheckpointFolder(tmp_path / "a").complete()
    assert saved.manifest.step == 2
    assert digests(saved.path) == expected, "closing lets a save end, and no later step is in it"


def test_a_worker_lost_while_its_copy_is_read_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, write = threading.Event(), checkpoint_writing.write_tensors

    def slow(path: Path, tensors: Any) -> Any:
        assert go_on.wait(30)
        return write(path, tensors)

    with thread_session(2) as session, trainer_for(session, ZERO2, tmp_path) as trainer:
        trainer.step(BATCHES[0])
        trainer.save_checkpoint()
        monkeypatch.setattr(checkpoint_writing, "write_tensors", slow)
        trainer._begin_save(trainer._checkpoints, trainer.job)  # type: ignore[arg-type]
        session.planes[1].close()
        go_on.set()
        trainer.close(failed="a worker is gone")
    assert "was not saved: lost peer rank 1" in caplog.text
    assert [saved.manifest.serial for saved in CheckpointFolder(tmp_path).complete()] == [1]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


# -- words -------------------------------------------------------------------------------------------------------


def test_a_trainer_without_a_folder_says_so() -> None:
    trainer = Trainer(DistributedModel(OddLM()), parallel=ParallelConfig(), progress=False)
    for call in (trainer.save_checkpoint, trainer.resume, lambda: trainer.fit(BATCHES, resume=True)):
        with pytest.raises(ConfigError, match=r"this trainer has no folder.*checkpoint=FOLDER"):
            call()


def test_an_earlier_runs_checkpoints_are_never_replaced_unasked(tmp_path: Path) -> None:
    with thread_session(1) as session:
        with trainer_for(session, Layout(), tmp_path) as trainer:
            trainer.fit(BATCHES[:1])
        with trainer_for(session, Layout(), tmp_path) as trainer:
            assert trainer.evaluate(BATCHES[:1]) > 0, "looking changes nothing"
            with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier run, the latest of step 1.*resume"):
                trainer.fit(BATCHES)
            assert trainer.fit(BATCHES[:1], resume=True).steps == [], "that one was finished"
    assert [saved.manifest.step for saved in CheckpointFolder(tmp_path).complete()] == [1]


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    trainer = Trainer(DistributedModel(OddLM()), parallel=ParallelConfig(), checkpoint=tmp_path, progress=False)
    assert trainer.resume() == 0
    with pytest.raises(ConfigError, match="no step has been taken"):
        trainer.save_checkpoint()
