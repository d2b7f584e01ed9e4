"""Stages on disk: what was written comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distensor.core.errors import ProgramRejectedError, StoreError
from distensor.program import Cut, Limits, StageRunner, capture, cut
from distensor.program.bundle import load_stage, save_stage


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.shift).square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pieces() -> Cut:
    return cut(capture(Model(), torch.ones(4, 3), loss_weight="rows"))


@pytest.fixture
def saved(pieces: Cut, tmp_path: Path) -> tuple[Path, str]:
    return tmp_path, save_stage(tmp_path, pieces.programs[0], pieces.weights(0))


def test_a_stage_comes_back_as_it_was(pieces: Cut, saved: tuple[Path, str]) -> None:
    program, weights = load_stage(*saved)
    assert program == pieces.programs[0]
    assert weights.keys() == pieces.weights(0).keys()
    assert all(torch.equal(weights[name], value) for name, value in pieces.weights(0).items())
    x = torch.ones(4, 3)
    ours = StageRunner(program, weights).forward({program.inputs[0].name: x})
    assert program.loss is not None
    assert torch.equal(ours[program.loss], pieces.captured.module(x))


def test_the_same_stage_is_the_same_file(pieces: Cut, saved: tuple[Path, str]) -> None:
    folder, digest = saved
    assert save_stage(folder, pieces.programs[0], pieces.weights(0)) == digest
    assert sorted(path.name for path in folder.iterdir()) == [f"{digest}.json", f"{digest}.safetensors"]


def test_a_program_under_another_digest_is_refused(saved: tuple[Path, str]) -> None:
    folder, digest = saved
    other = "0" * 64
    (folder / f"{digest}.json").rename(folder / f"{other}.json")
    with pytest.raises(ProgramRejectedError, match=digest):
        load_stage(folder, other)


def test_missing_files_are_named(saved: tuple[Path, str]) -> None:
    folder, digest = saved
    (folder / f"{digest}.safetensors").unlink()
    with pytest.raises(StoreError, match="safetensors"):
        load_stage(folder, digest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layer.bias": None}, r"missing weights \['layer.bias'\]"),
        ({"more": torch.zeros(1)}, r"unknown ones \['more'\]"),
        ({"layer.bias": torch.zeros(3)}, r"layer.bias is F32 \[3\], not float32 \[2\]"),
        ({"layer.bias": torch.zeros(2, dtype=torch.float64)}, "layer.bias is F64"),
    ],
)
def test_weights_that_are_not_the_programs_are_refused(
    pieces: Cut, tmp_path: Path, change: dict[str, Tensor | None], says: str
) -> None:
    weights = {name: value for name, value in {**pieces.weights(0), **change}.items() if value is not None}
    digest = save_stage(tmp_path, pieces.programs[0], weights)
    with pytest.raises(ProgramRejectedError, match=says):
        load_stage(tmp_path, digest)


def test_files_over_the_limit_are_not_read(saved: tuple[Path, str]) -> None:
    with pytest.raises(ProgramRejectedError, match="limit of 10 bytes"):
        load_stage(*saved, limits=Limits(max_json_bytes=10))
    with pytest.raises(ProgramRejectedError):
        load_stage(*saved, limits=dataclasses.replace(Limits(), max_bytes=10))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut_at=st.integers(0, 10_000), flip=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_damaged_file_is_refused_or_harmless(
    saved: tuple[Path, str], pieces: Cut, cut_at: int, flip: int, value: int
) -> None:
    """Never a crash: a flipped bit inside a number is another number, everything else is refused."""
    folder, digest = saved
    path = folder / f"{digest}.safetensors"
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[flip % len(good)] ^= value
    try:
        for data in (good[: cut_at % len(good)], bytes(damaged)):
            path.write_bytes(data)
            try:
                _, weights = load_stage(folder, digest)
            except ProgramRejectedError:
                continue
            assert {name: tuple(t.shape) for name, t in weights.items()} == {
                name: tuple(t.shape) for name, t in pieces.weights(0).items()
            }
    finally:
        path.write_bytes(good)


def test_a_folder_that_cannot_be_written_is_named(pieces: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)  # as if somebody had removed the folder again
    with pytest.raises(StoreError, match="nowhere"):
        save_stage(tmp_path / "nowhere", pieces.programs[0], pieces.weights(0))
