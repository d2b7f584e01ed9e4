"""Batches as named tensors, and what a later batch may not change."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from program_families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.errors import BatchError
from distensor.program import Cut, capture, cut, run_module
from distensor.program.batch import Fixed, Keyed, Leaf, Listed, difference, flatten, leaves, rebuild

X, Y, Z = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 2)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (X, ["input"]),
        ((X, Y), ["inputs", "targets"]),
        ([X, Y], ["inputs", "targets"]),
        ((X, Y, Z), ["0", "1", "2"]),
        (((X, Z), Y), ["inputs.0", "inputs.1", "targets"]),
        (({"b": X, "a": Z}, Y), ["inputs.a", "inputs.b", "targets"]),
        ({"labels": Y, "input_ids": X, "flag": True}, ["input_ids", "labels"]),
        (UserDict({"x": X}), ["x"]),
    ],
)
def test_names(batch: Any, names: list[str]) -> None:
    structure, tensors = flatten(batch)
    assert list(tensors) == names
    assert list(leaves(structure)) == names


def test_rebuild_gives_the_batch_again() -> None:
    batch = {"a": X, "b": (Y, [Z, 3], None), "c": {"d": "word"}}
    structure, tensors = flatten(batch)
    again = rebuild(structure, tensors)
    assert again["a"] is X
    assert again["b"][1] == (Z, 3)
    assert again["b"][2] is None
    assert again["c"] == {"d": "word"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"x": X}, r"batch has the keys \['x'\]; captured with \['x', 'y'\]"),
        ({"x": X, "y": 4}, r"batch\['y'\] is 4; captured with 3"),
        ({"x": X, "y": X}, r"batch\['y'\] is a tensor; captured with 3"),
        ({"x": (X,), "y": 3}, r"batch\['x'\] is a tuple or list; captured with a tensor"),
        ((X, 3), r"batch is a tuple or list; captured with a mapping"),
    ],
)
def test_differences_in_words(other: Any, words: str) -> None:
    structure, _ = flatten({"x": X, "y": 3})
    found = difference(structure, flatten(other)[0])
    assert found is not None
    assert found == words.replace("\\", "")


def test_equal_structures_have_no_difference() -> None:
    assert difference(Keyed((("a", Listed((Leaf("a.0"), Fixed(1)))),)), flatten({"a": [X, 1]})[0]) is None
    found = difference(flatten({"a": [X, 1]})[0], flatten({"a": [X]})[0])
    assert found == "batch['a'] has 1 items; captured with 2"


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Any:
        out = self.layer(x) * scale
        return out if y is None else {"loss": F.mse_loss(out, y), "out": out}


def squared(out: Any, batch: Any) -> Tensor:
    return F.mse_loss(out, batch[1] if isinstance(batch, tuple) else batch)


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        ((X, Y), squared),
        (((X,), Y), squared),
        (({"x": X, "scale": 2.0}, Y), squared),
        (X, squared),
        ({"x": X, "y": Y, "scale": 3.0}, None),
        ((X, Y), None),
    ],
)
def test_forms_of_a_batch(batch: Any, loss: Any) -> None:
    module = Takes().train()
    pieces = cut(capture(module, batch, loss=loss))
    from program_harness import eager, gradient_differences, run_cut, runners_of

    reference = eager(module, batch, loss)
    ours = run_cut(pieces, runners_of(pieces), batch, 2)
    assert max(gradient_differences(ours, reference).values()) <= 1e-6


@pytest.mark.parametrize("result", ["nothing", "vector", "integer"])
def test_what_is_no_loss_is_named(result: str) -> None:
    def loss(out: Tensor, batch: Any) -> Any:
        return {"nothing": None, "vector": out, "integer": out.argmax()}[result]

    with pytest.raises(BatchError, match=r"loss\(outputs, batch\) gave"):
        run_module(Takes(), (X, Y), loss)


def _pieces() -> Cut:
    family = FAMILIES["mistral"]
    return cut(capture(family.build(), family.batch(4, 12)))


def test_a_later_batch_is_checked() -> None:
    pieces = _pieces()
    ids = torch.randint(0, 97, (3, 9))
    assert set(pieces.flatten_batch({"input_ids": ids, "labels": ids})) == {"input_ids", "labels"}
    for batch, message in (
        ({"input_ids": ids}, "has the keys.*a batch must look like the first one"),
        ({"input_ids": ids.float(), "labels": ids}, r"'input_ids' is torch\.float32 with 2 dims; captured as int64"),
        ({"input_ids": ids[0], "labels": ids}, "1 dims; captured as int64 with 2 dims"),
        ({"input_ids": ids[:2], "labels": ids}, r"'labels' has shape \[3, 9\]; dim 0 must be batch = 2"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, r"the module takes another path for these sizes.*labels"),
        ({"input_ids": ids[:, :5], "labels": ids[:, :5]}, "sequence is 5; the module was captured for 7 to any size"),
    ):
        with pytest.raises(BatchError, match=message):
            pieces.flatten_batch(batch)


def test_rows_are_split_and_the_rest_is_repeated() -> None:
    class Shifted(Takes):
        def forward(self, x: Tensor, y: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return F.mse_loss(self.layer(x) + shift, y)

    batch = {"x": X, "y": Y, "shift": torch.randn(1, 4)}
    pieces = cut(capture(Shifted().train(), batch))
    first, second = pieces.split_rows(pieces.flatten_batch(batch), [1, 2])
    assert torch.equal(first["x"], X[:1])
    assert torch.equal(second["y"], Y[1:])
    assert torch.equal(first["shift"], second["shift"])


def test_pictures_keep_their_size_and_masks_do_not() -> None:
    vit = FAMILIES["vit"]
    pieces = cut(capture(vit.build(), vit.batch(4, 0)))
    assert [dim.name for dim in pieces.captured.dims] == ["batch"]
    small = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(BatchError, match=r"'pixel_values' has shape \[2, 3, 8, 8\]; dim 2 must be 16, as captured"):
        pieces.flatten_batch(small)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            states = self.embed(ids).unsqueeze(1)
            return F.scaled_dot_product_attention(states, states, states, mask).square().mean()

    def given(rows: int, sequence: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, 5, (rows, sequence)), "mask": torch.randn(rows, 1, sequence, sequence)}

    masked = cut(capture(Masked().train(), given(3, 6)))
    assert set(masked.flatten_batch(given(2, 9))) == {"ids", "mask"}
