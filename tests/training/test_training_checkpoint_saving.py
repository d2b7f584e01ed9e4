"""Saves in the background: one at a time, never waited for by a step, never lost without a word."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_kit as kit
import pytest
import torch
from torch import nn

from distensor.core.errors import CheckpointError, ConfigError, PeerLostError, StoreError
from distensor.optim import LrSchedule, OptimizerSpec
from distensor.optim.schedules import Curve
from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_manifest import Group, Manifest
from distensor.training.checkpoint_model import check_model, fill_model, model_tensors
from distensor.training.checkpoint_options import CheckpointOptions, checkpoint_options
from distensor.training.checkpoint_saving import BackgroundSaver
from distensor.training.checkpoint_settings import Resumed, resumed_lr, resumed_schedule, warn_of_changes
from distensor.training.checkpoint_shards import check_files, spec_of
from distensor.training.checkpoint_writing import Draft
from distensor.training.checkpointing import Checkpointing, open_checkpoint

SECONDS = 20.0


class SlowSource:
    """Hands out tensors once a test lets it; a worker that copied its state, at the end of a slow line."""

    def __init__(self, seed: int = 0, error: Exception | None = None) -> None:
        self.tensors = kit.some_tensors(seed)
        self.error = error
        self.go_on = threading.Event()
        self.released = False

    def fetch(self, group: Group, name: str) -> torch.Tensor:
        assert self.go_on.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return self.tensors[group][name]

    def release(self) -> None:
        self.released = True

    def draft(self, step: int) -> Draft:
        return kit.draft_of(self.tensors, step)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[BackgroundSaver]:
    opened = BackgroundSaver(CheckpointOptions(path=tmp_path, every=None, keep=1), file_bytes=200)
    yield opened
    opened.close()


def save(saver: BackgroundSaver, source: SlowSource, step: int) -> None:
    saver.start(source.draft(step), source)


def test_ckp_02_the_old_checkpoint_stays_until_the_new_one_is_complete(saver: BackgroundSaver, tmp_path: Path) -> None:
    first, second = SlowSource(0), SlowSource(1)
    first.go_on.set()
    save(saver, first, 1)
    saver.wait(SECONDS)
    save(saver, second, 2)
    assert saver.busy
    latest = CheckpointFolder(tmp_path).find()
    assert latest is not None
    assert latest.manifest.step == 1, "keep=1, and the writer is slow: the one that is complete is the latest"
    check_files(latest.path, latest.manifest)
    second.go_on.set()
    saver.wait(SECONDS)
    assert [each.manifest.step for each in CheckpointFolder(tmp_path).complete()] == [2]
    assert saver.last is not None
    assert saver.last.path.name == "step-00000002"
    assert first.released
    assert second.released


def test_a_failed_save_is_logged_at_once_and_raised_where_somebody_waits(
    saver: BackgroundSaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SlowSource(error=PeerLostError(1, "gone"))
    source.go_on.set()
    with caplog.at_level(logging.ERROR):
        save(saver, source, 7)
        with pytest.raises(PeerLostError, match="lost peer rank 1"):
            saver.wait(SECONDS)
    assert "checkpoint of step 7 was not saved: lost peer rank 1: gone" in caplog.text
    assert list(tmp_path.glob("step-*")) == []
    saver.wait(SECONDS)


def test_a_bug_in_the_thread_is_not_lost(saver: BackgroundSaver) -> None:
    source = SlowSource(error=KeyError("oops"))
    source.go_on.set()
    save(saver, source, 7)
    with pytest.raises(StoreError, match=r"step 7 failed: KeyError\('oops'\)"):
        saver.wait(SECONDS)


def test_a_folder_that_cannot_be_used_is_found_before_anything_is_copied(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = BackgroundSaver(CheckpointOptions(path=tmp_path / "file", every=None, keep=1))
    with pytest.raises(StoreError, match=r"checkpoint folder .* cannot be used"):
        saver.prepare()


def test_left_overs_of_a_killed_process_are_swept_when_the_folder_is_taken(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    (tmp_path / "step-00000009").mkdir()
    saver.prepare()
    assert not (tmp_path / "step-00000009").exists()


# -- when to save ------------------------------------------------------------------------------------------------


class Snapshot(SlowSource):
    copy_seconds = 0.0

    @property
    def specs(self) -> Any:
        return {group: {n: spec_of(t) for n, t in named.items()} for group, named in self.tensors.items()}


def begin(checkpoints: Checkpointing, step: int, snapshot: Snapshot) -> None:
    checkpoints.begin(step, snapshot, nn.Linear(1, 1), {}, None)  # type: ignore[arg-type]


def test_a_save_that_is_due_too_early_is_made_as_soon_as_the_earlier_one_is_done(tmp_path: Path) -> None:
    checkpoints = Checkpointing(CheckpointOptions(path=tmp_path, every=2, keep=3))
    assert [checkpoints.due(step) for step in (1, 2)] == [False, True]
    slow = Snapshot()
    begin(checkpoints, 2, slow)
    assert [checkpoints.due(step) for step in (3, 4, 5)] == [False, False, False], "the writer is still busy"
    slow.go_on.set()
    checkpoints.wait()
    assert checkpoints.due(5), "step 4 was passed over"
    begin(checkpoints, 5, slow)
    checkpoints.wait()
    assert [checkpoints.due(step) for step in (5, 6)] == [False, True]
    assert checkpoints.is_saved(5)
    checkpoints.close(failed=False)
    assert [each.manifest.step for each in checkpoints.folder.complete()] == [2, 5]
    assert checkpoints.last == tmp_path / "step-00000005"


def test_without_an_interval_nothing_is_ever_due(tmp_path: Path) -> None:
    checkpoints = Checkpointing(CheckpointOptions(path=tmp_path, every=None, keep=1))
    assert not any(checkpoints.due(step) for step in range(1, 100))


# -- the module --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.head = nn.Linear(width, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def saved_net(path: Path, net: nn.Module, state: dict[str, torch.Tensor] | None = None) -> Any:
    tensors = {Group.MODEL: dict(model_tensors(net).tensors), Group.OPTIMIZER: state or {}}
    specs = {group: {name: spec_of(t) for name, t in named.items()} for group, named in tensors.items()}
    draft = Draft(step=1, specs=specs, aliases=model_tensors(net).aliases, run={}, position=None)
    source = SlowSource()
    source.tensors, _ = (
        {g: {n: t.detach() for n, t in named.items()} for g, named in tensors.items()},
        source.go_on.set(),
    )
    saver = BackgroundSaver(CheckpointOptions(path=path, every=None, keep=1))
    saver.start(draft, source)
    saver.wait(SECONDS)
    saver.close()
    return saver.last


def test_a_tied_weight_is_stored_once_and_a_buffer_that_is_not_persistent_is_not(tmp_path: Path) -> None:
    net = Net()
    saved = saved_net(tmp_path, net)
    assert set(saved.manifest.tensors[Group.MODEL]) == {"embed.weight", "mask"}
    assert saved.manifest.aliases == {"head.weight": "embed.weight"}
    other = Net()
    fill_model(other, saved)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())
    assert other.head.weight is other.embed.weight


def test_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    saved = saved_net(tmp_path, Net())
    with pytest.raises(ConfigError) as caught:
        check_model(Net(width=4, tied=False), saved)
    for line in (
        "'embed.weight' is float32 [7, 3] in the checkpoint and float32 [7, 4] in the model",
        "'head.weight' (float32 [7, 4]) is in the model and not in the checkpoint",
        "'head.weight' is tied to 'embed.weight' in the checkpoint only",
    ):
        assert line in str(caught.value)
    with pytest.raises(ConfigError, match=r"'head.weight' is tied to 'embed.weight' in the model only"):
        check_model(Net(), saved_net(tmp_path / "other", Net(tied=False)))


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}


def test_a_state_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'_extra_state'\] is a dict: a checkpoint holds only tensors"):
        model_tensors(Extra(2, 2))


def moments(**change: torch.Tensor) -> dict[str, torch.Tensor]:
    state = {f"embed.weight/{name}": torch.zeros(7, 3) for name in ("exp_avg", "exp_avg_sq")}
    return {**state, "embed.weight/step": torch.tensor(1.0), **{key.replace("__", "/"): t for key, t in change.items()}}


ADAMW = OptimizerSpec(name="adamw", lr=0.1)


def test_the_optimizer_of_the_checkpoint_is_checked_before_anything_changes(tmp_path: Path) -> None:
    saved_net(tmp_path, Net(), moments())
    folder, net = CheckpointFolder(tmp_path), Net()
    before = net.embed.weight.detach().clone()
    assert open_checkpoint(folder, None, net, ADAMW) is not None
    with pytest.raises(ConfigError, match=r"another optimizer's state: 'embed.weight/exp_avg': sgd keeps no 'exp_avg'"):
        open_checkpoint(folder, None, net, OptimizerSpec(name="sgd", lr=0.1))
    net.embed.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"'embed.weight/step': no trainable parameter 'embed.weight' here"):
        open_checkpoint(folder, None, net, ADAMW)
    assert torch.equal(net.embed.weight, before)


def test_state_of_another_shape_is_named(tmp_path: Path) -> None:
    saved_net(tmp_path, Net(), {**moments(), "embed.weight/exp_avg": torch.zeros(3, 7)})
    with pytest.raises(
        ConfigError, match=r"'embed.weight/exp_avg' is float32 \[3, 7\]; expected torch.float32 \[7, 3\]"
    ):
        open_checkpoint(CheckpointFolder(tmp_path), None, Net(), ADAMW)


def test_no_checkpoint_is_none_and_a_missing_step_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert open_checkpoint(folder, None, Net(), ADAMW) is None
    with pytest.raises(ConfigError, match="no checkpoint of step 3; it holds none at all"):
        open_checkpoint(folder, 3, Net(), ADAMW)


# -- settings ----------------------------------------------------------------------------------------------------


def test_settings_that_change_the_numbers_are_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = {"seed": 0, "lr": 0.1, "clip_norm": None, "parallel": "dp2"}
    manifest = Manifest(step=1, serial=1, tensors={}, aliases={}, files={}, run=saved, position=None)
    resumed = Resumed(saved=Saved(path=Path("x"), manifest=manifest), lr=0.1, schedule=None)
    with caplog.at_level(logging.WARNING):
        lines = warn_of_changes(resumed, {"seed": 1, "lr": 0.2, "clip_norm": None, "parallel": "tp2"})
    assert lines == ["seed is 1 now and was 0"]
    assert lines[0] in caplog.text
    assert warn_of_changes(resumed, dict(saved)) == []


@pytest.mark.parametrize(("script", "expected"), [(0.1, 0.05), (0.2, 0.2)])
def test_a_rate_assigned_during_the_run_comes_back_unless_the_script_changed(script: float, expected: float) -> None:
    assert resumed_lr({"first_lr": 0.1, "lr": 0.05}, script) == expected


def test_a_schedule_that_had_found_out_its_length_keeps_it() -> None:
    run = {"lr_schedule": LrSchedule(curve=Curve.COSINE, warmup_steps=3, total_steps=40).to_json()}
    assert resumed_schedule(run, LrSchedule(curve=Curve.COSINE, warmup_steps=3)).total_steps == 40
    for own in (LrSchedule(curve=Curve.LINEAR), LrSchedule(curve=Curve.COSINE, total_steps=9), None):
        assert resumed_schedule(run, own) == own
    with pytest.raises(CheckpointError, match="learning-rate schedule"):
        resumed_schedule({"lr_schedule": {"curve": "zigzag"}}, LrSchedule(curve=Curve.COSINE))


# -- keywords ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        (("", None, None), "checkpoint='': expected a folder"),
        ((3, None, None), "checkpoint=3: expected a folder"),
        (("x", 0, None), "checkpoint_every=0: expected a whole number"),
        (("x", 1.5, None), "checkpoint_every=1.5: expected a whole number"),
        (("x", None, True), "checkpoint_keep=True: expected a whole number"),
        ((None, 3, None), "checkpoint_every=3 needs checkpoint=FOLDER"),
        ((None, None, 1), "checkpoint_keep=1 needs checkpoint=FOLDER"),
    ],
)
def test_keywords_that_cannot_be_are_named(keywords: tuple[Any, Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checkpoint_options(*keywords)


def test_keywords_have_defaults(tmp_path: Path) -> None:
    assert checkpoint_options(None, None, None) is None
    assert checkpoint_options(tmp_path, 5, None) == CheckpointOptions(path=tmp_path, every=5, keep=2)
    at_home = checkpoint_options("~/run", None, None)
    assert at_home is not None
    assert at_home.path == Path.home() / "run"
