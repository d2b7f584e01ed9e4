"""Split backward: gradients of weights come later, and are the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from program_families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.program import Cut, StageRunner, WeightGradients, capture, cut
from distensor.program.products import putting_off
from distensor.program.values import WeightRef


class Mixed(nn.Module):
    """Every kind of product, an embedding tied to the head, a weight that is also used in another way, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, 8, padding_idx=2)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Parameter(torch.randn(16, 8) / 4)
        self.down_bias = nn.Parameter(torch.randn(8))
        self.other = nn.Parameter(torch.randn(8, 8) / 4)
        self.penalised = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.embed(ids)), 0.25)
        hidden = torch.nn.functional.gelu(self.up(x))
        flat = torch.addmm(self.down_bias, hidden.flatten(0, 1), self.down).view_as(x)
        x = x + flat @ self.other + torch.tanh(x @ self.other.t())
        x = self.frozen(self.penalised(x))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.01 * self.penalised.weight.square().mean()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.fixture(scope="module")
def pieces() -> Cut:
    return cut(capture(Mixed().train(), batch()))


def whole(pieces: Cut, *, split: bool) -> StageRunner:
    return StageRunner(pieces.programs[0], pieces.weights(0), split_backward=split)


def test_products_are_found_by_what_their_weights_are_used_for(pieces: Cut) -> None:
    program = pieces.programs[0]
    groups: dict[int, set[str]] = {}
    for index, group in putting_off(program).items():
        groups.setdefault(group, set()).update(
            reference.name for reference in program.nodes[index].references() if isinstance(reference, WeightRef)
        )
    weights = {spec.name for spec in program.parameters}
    found = [names & weights for names in groups.values()]
    assert {"up.weight", "up.bias"} in found
    assert {"down", "down_bias"} in found
    assert {"other"} in found, "two products share it, one of them transposed: one group"
    assert {"embed.weight"} in found, "embedding and head share it"
    assert not any("penalised" in name or "frozen" in name or "norm" in name for names in found for name in names)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_of_the_plain_backward(pieces: Cut, micro_batches: int) -> None:
    plain, split = whole(pieces, split=False), whole(pieces, split=True)
    name = str(plain.program.loss)
    for seed in range(micro_batches):
        plain.forward(batch(), seed=seed)[name].backward()  # type: ignore[no-untyped-call]
    waiting = []
    for seed in range(micro_batches):
        put_off = WeightGradients()
        split.forward(batch(), seed=seed, put_off=put_off)[name].backward()  # type: ignore[no-untyped-call]
        waiting.append(put_off)
    assert split.parameters["up.weight"].grad is None
    assert split.parameters["penalised.weight"].grad is not None, "it is used in another way too"
    for put_off in waiting:
        put_off.run()
    for key, parameter in plain.parameters.items():
        got = split.parameters[key].grad
        if parameter.grad is None:
            assert got is None
            continue
        assert got is not None
        shared = key in ("embed.weight", "other")  # a sum of two products may be taken in the other order
        torch.testing.assert_close(got, parameter.grad, rtol=1e-6 if shared else 0, atol=1e-7 if shared else 0)


def test_each_parameter_accumulates_once_in_each_pass(pieces: Cut) -> None:
    split = whole(pieces, split=True)
    counts: dict[str, int] = {}
    for key, parameter in split.parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, key=key: counts.update({key: counts.get(key, 0) + 1})
            )
    put_off = WeightGradients()
    split.forward(batch(), put_off=put_off)[str(split.program.loss)].backward()  # type: ignore[no-untyped-call]
    put_off.run()
    assert counts == {key: 1 for key, parameter in split.parameters.items() if parameter.requires_grad}


def test_nothing_is_held_after_the_weight_gradients(pieces: Cut) -> None:
    split = whole(pieces, split=True)
    put_off = WeightGradients()
    seen: list[Any] = []

    def note(saved: Tensor) -> Tensor:
        seen.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss = split.forward(batch(), put_off=put_off)[str(split.program.loss)]
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    put_off.run()
    gc.collect()
    kept = [held for ref in seen if (held := ref()) is not None]
    own = {id(tensor) for tensor in (*split.parameters.values(), *split.buffers.values())}
    assert all(id(tensor) in own or tensor.numel() <= 15 for tensor in kept), [tuple(t.shape) for t in kept]


def test_without_a_place_to_put_them_gradients_come_at_once(pieces: Cut) -> None:
    split = whole(pieces, split=True)
    split.forward(batch(), seed=1)[str(split.program.loss)].backward()  # type: ignore[no-untyped-call]
    assert split.parameters["up.weight"].grad is not None


@pytest.mark.parametrize("family", ["gpt2", "llama_tied"])
def test_model_families_put_off_all_their_matrices(family: str) -> None:
    made = FAMILIES[family]
    pieces = cut(capture(made.build().train(), made.batch(*made.sizes[0]), loss=made.loss))
    program = pieces.programs[0]
    found = {
        reference.name
        for index in putting_off(program)
        for reference in program.nodes[index].references()
        if isinstance(reference, WeightRef)
    }
    assert found >= {spec.name for spec in program.parameters if len(spec.shape) == 2}
    plain, split = whole(pieces, split=False), whole(pieces, split=True)
    flat, name = pieces.flatten_batch(made.batch(*made.sizes[1])), str(program.loss)
    plain.forward(flat)[name].backward()  # type: ignore[no-untyped-call]
    put_off = WeightGradients()
    split.forward(flat, put_off=put_off)[name].backward()  # type: ignore[no-untyped-call]
    put_off.run()
    for key, parameter in plain.parameters.items():
        torch.testing.assert_close(split.parameters[key].grad, parameter.grad, rtol=1e-6, atol=1e-7)
