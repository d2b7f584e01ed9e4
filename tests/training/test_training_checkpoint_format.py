"""What a checkpoint on the disk is: complete or not there, checked to the last bit, readable without us."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_kit as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from distensor.core.errors import CheckpointError, ConfigError, StoreError
from distensor.program.values import DType
from distensor.training.checkpoint_fit import MOST_SHOWN, check_fit
from distensor.training.checkpoint_folder import CheckpointFolder, Saved
from distensor.training.checkpoint_manifest import MANIFEST, VERSION, Group, Manifest, TensorSpec
from distensor.training.checkpoint_shards import check_files, describe_file, read_tensors, spec_of, write_bytes
from distensor.training.checkpoint_writing import INDEX


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return kit.write(tmp_path / "run")


def test_everything_comes_back_bit_for_bit(saved: Saved) -> None:
    check_files(saved.path, saved.manifest)
    for group, expected in kit.some_tensors().items():
        found = dict(read_tensors(saved.path, saved.manifest, group))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype is tensor.dtype
            assert torch.equal(found[name], tensor)


def test_the_manifest_says_what_was_saved(saved: Saved) -> None:
    assert CheckpointFolder(saved.path.parent).find() == saved
    assert (saved.manifest.step, saved.manifest.serial, saved.path.name) == (3, 1, "step-00000003")
    assert saved.manifest.aliases == {"head.weight": "embed.weight"}
    assert saved.manifest.run == {"lr": 0.1}


def test_files_stay_near_their_size_and_read_without_us(saved: Saved) -> None:
    index = json.loads((saved.path / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1, "the limit of this test is 120 bytes a file"
    weights = {name: load_file(saved.path / file)[name] for name, file in index.items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in kit.some_tensors()[Group.MODEL].items())


def test_a_manifest_is_not_touched_by_what_comes_later(tmp_path: Path) -> None:
    first = kit.write(tmp_path, step=3)
    again = kit.write(tmp_path, step=3, seed=1)
    assert again.path.name == "step-00000003.1"
    assert CheckpointFolder(tmp_path).find() == again, "the newest of a step"
    check_files(first.path, first.manifest)


def test_the_latest_is_the_last_written_whatever_its_step(tmp_path: Path) -> None:
    kit.write(tmp_path, step=9)
    branch = kit.write(tmp_path, step=5)
    folder = CheckpointFolder(tmp_path)
    assert folder.find() == branch, "somebody went back to step 4 and on from there"
    with pytest.raises(ConfigError, match=r"no checkpoint of step 7; it holds steps 5, 9"):
        folder.find(7)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        kit.write(tmp_path, step=step, keep=2)
    assert [each.manifest.step for each in CheckpointFolder(tmp_path).complete()] == [3, 4]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path).find() is None
    assert CheckpointFolder(tmp_path / "nowhere").find(3) is None


class Stopped(BaseException):
    """Ends a save in the middle, as a signal would."""


@pytest.mark.parametrize("calls", range(9))
def test_whatever_ends_a_save_the_old_one_is_loadable_at_every_instant(tmp_path: Path, calls: int) -> None:
    old, tensors, left = kit.write(tmp_path, keep=1), kit.some_tensors(1), [calls]

    def fetch(group: Group, name: str) -> torch.Tensor:
        latest = CheckpointFolder(tmp_path).find()
        assert latest == old
        check_files(old.path, old.manifest)
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return tensors[group][name]

    with pytest.raises(Stopped):
        kit.write(tmp_path, step=4, keep=1, fetch=fetch)
    assert [path.name for path in tmp_path.glob("step-*")] == [old.path.name], "and nothing else is left"


def test_a_full_disk_costs_only_the_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = kit.write(tmp_path, keep=1)

    def full(self: Path, target: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreError, match=r"manifest\.json cannot be written.*No space left"):
        kit.write(tmp_path, step=4, keep=1)
    assert CheckpointFolder(tmp_path).complete() == [old]


def test_what_a_killed_process_left_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    old = kit.write(tmp_path)
    left = tmp_path / "step-00000004"
    left.mkdir()
    write_bytes(left / "model-00001-of-00001.safetensors", b"half")
    (left / f"{MANIFEST}.partial").write_bytes(old.manifest.to_json()[:50])
    folder = CheckpointFolder(tmp_path)
    assert folder.complete() == [old]
    with folder.writing():
        folder.sweep()
    assert not left.exists()
    assert folder.complete() == [old]


HOLD = """
import sys
from distensor.training.checkpoint_folder import CheckpointFolder
with CheckpointFolder(sys.argv[1]).writing():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match="another trainer writes"), CheckpointFolder(tmp_path).writing():
            pass
    finally:
        other.kill()
        other.communicate()
    with CheckpointFolder(tmp_path).writing():
        pass


TRY = """
import sys
from distensor.training.checkpoint_folder import CheckpointFolder
with CheckpointFolder(sys.argv[1]).writing():
    pass
"""


def test_a_folder_stays_locked_until_the_last_trainer_of_a_process_lets_go(tmp_path: Path) -> None:
    """One that failed is often closed after the next one has begun."""
    failed, following = ExitStack(), ExitStack()
    for held in (failed, following):
        held.enter_context(CheckpointFolder(tmp_path).writing())
    failed.close()
    other = subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "another trainer writes" in other.stderr
    following.close()
    subprocess.run([sys.executable, "-c", TRY, str(tmp_path)], check=True)


# -- damage ------------------------------------------------------------------------------------------------------


def _delete(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(_delete, "is missing"), (_cut, r"has \d+ bytes, the manifest says \d+"), (_flip, "is damaged")],
)
def test_every_damaged_file_is_named(saved: Saved, damage: Callable[[Path], None], said: str) -> None:
    names = ("model-00002-of-", "optimizer-00001-of-", INDEX)
    for start in names:
        damage(next(saved.path.glob(f"{start}*")))
    with pytest.raises(CheckpointError) as caught:
        check_files(saved.path, saved.manifest)
    for start in names:
        assert start in str(caught.value)
    assert caught.match(said)


def test_a_file_whose_tensors_are_others_is_named(saved: Saved) -> None:
    file = saved.manifest.tensors[Group.MODEL]["embed.weight"].file
    save_file({"embed.weight": torch.zeros(2, 3)}, saved.path / file)
    with pytest.raises(CheckpointError, match=rf"{file}: 'embed.weight' is .*2, 3.*the manifest says .*7, 3"):
        list(read_tensors(saved.path, saved.manifest, Group.MODEL))
    (saved.path / file).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=rf"{file}: 'embed.weight' cannot be read"):
        list(read_tensors(saved.path, saved.manifest, Group.MODEL))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_sec_05_a_pickle_in_place_of_a_file_is_refused_and_never_run(saved: Saved, tmp_path: Path) -> None:
    marker = tmp_path / "was-run"
    bomb = pickle.dumps(Bomb(marker))
    for file in saved.path.glob("*.safetensors"):
        file.write_bytes(bomb)
        entry = describe_file(file)
        forged = {**saved.manifest.files, file.name: entry}
        saved = Saved(path=saved.path, manifest=replace(saved.manifest, files=forged))
    check_files(saved.path, saved.manifest)
    for group in Group:
        with pytest.raises(CheckpointError, match="cannot be read"):
            list(read_tensors(saved.path, saved.manifest, group))
    (saved.path / MANIFEST).write_bytes(bomb)
    with pytest.raises(CheckpointError, match="is no JSON"):
        CheckpointFolder(saved.path.parent).find()
    assert not marker.exists()
    pickle.loads(bomb)
    assert marker.exists(), "the bomb was a live one"


def test_a_damaged_manifest_is_named_and_not_passed_over(saved: Saved) -> None:
    path = saved.path / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"step": 3', b'"step": 4'))
    with pytest.raises(CheckpointError, match=r"step-00000003/manifest.json: its sha256 is not that of its content"):
        CheckpointFolder(saved.path.parent).find()


def test_a_newer_format_is_refused_by_both_versions(saved: Saved) -> None:
    content = json.loads(saved.manifest.to_json())
    content["version"] = VERSION + 1
    with pytest.raises(CheckpointError, match=rf"here has format version {VERSION + 1}.*reads up to {VERSION}"):
        Manifest.from_json(json.dumps(content).encode(), where="here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no manifest"),
        (b'{"format": "distensor-checkpoint"}', "version=None"),
        (b'{"format": "distensor-checkpoint", "version": 1}', "files=None"),
    ],
)
def test_what_is_no_manifest_is_refused(text: bytes, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Manifest.from_json(text, where="here")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("files",), {"../x": {"size": 1, "sha256": "0" * 64}}, "plain file name"),
        (("files",), {"x": {"size": 1, "sha256": "zz"}}, "size and sha256"),
        (("files",), {"x": {"size": -1, "sha256": "0" * 64}}, "whole number"),
        (("tensors",), {"extra": {}}, "expected one of model, optimizer, rng"),
        (("tensors", "model", "count", "file"), "elsewhere.safetensors", "not known here"),
        (("tensors", "model", "count", "dtype"), "float7", "not known here"),
        (("tensors", "model", "count", "shape"), [1.5], "whole numbers"),
        (("aliases",), {"a": "b"}, "not known here"),
        (("step",), True, "whole number"),
    ],
)
def test_a_field_that_is_wrong_is_named(saved: Saved, path: tuple[str, ...], value: Any, said: str) -> None:
    content = json.loads(saved.manifest.to_json())
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(CheckpointError, match=said):
        Manifest.from_json(json.dumps(content).encode(), where="here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 0.999), value=JSON)
def test_no_change_of_a_manifest_goes_unnoticed(where: float, value: Any) -> None:
    manifest = Manifest(step=1, serial=1, tensors={}, aliases={}, files={}, run={"lr": 0.5}, position={"epoch": 1})
    content = json.loads(manifest.to_json())
    places = list(_places(content))
    holder, key = places[int(where * len(places))]
    unchanged = type(holder[key]) is type(value) and holder[key] == value
    holder[key] = value
    text = json.dumps(content).encode()
    if unchanged:
        assert Manifest.from_json(text, where="x") == manifest
    else:
        with pytest.raises(CheckpointError):
            Manifest.from_json(text, where="x")


# -- another model -----------------------------------------------------------------------------------------------


def spec(*shape: int, dtype: DType = DType.FLOAT32) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape)


def test_all_differences_to_the_model_are_listed() -> None:
    saved = {"a": spec(1), "b": spec(2, 3), "c": spec(4), "same": spec(1)}
    own = {"b": spec(3, 2), "c": spec(4, dtype=DType.BFLOAT16), "d": spec(9), "same": spec(1)}
    with pytest.raises(ConfigError) as caught:
        check_fit(saved, own, where="step-00000003")
    assert str(caught.value) == (
        "step-00000003 is a checkpoint of another model: "
        "'a' (float32 [1]) is in the checkpoint and not in the model; "
        "'d' (float32 [9]) is in the model and not in the checkpoint; "
        "'b' is float32 [2, 3] in the checkpoint and float32 [3, 2] in the model; "
        "'c' is float32 [4] in the checkpoint and bfloat16 [4] in the model"
    )
    check_fit(saved, dict(saved), where="x")


def test_a_long_list_of_differences_is_cut() -> None:
    saved = {f"w{index}": spec(1) for index in range(MOST_SHOWN + 7)}
    with pytest.raises(ConfigError, match=r"; and 7 more$"):
        check_fit(saved, {}, where="x")


def test_a_dtype_that_no_program_knows_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn cannot be part"):
        spec_of(torch.zeros(1).to(torch.float8_e4m3fn))
