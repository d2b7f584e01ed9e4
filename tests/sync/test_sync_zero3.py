"""Weights cut over a group: the same sums as with whole copies, in a part of the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sync_kit import TIED, TwoStages, ids_of, in_group, planes_of
from torch import Tensor, nn

from distensor.core.errors import PeerLostError
from distensor.optim import OptimizerSpec
from distensor.optim.spec import OPTIONS
from distensor.optim.updater import Updater
from distensor.sync.stores import ReplicatedWeights, WeightStore, keyed
from distensor.sync.zero3 import ShardedWeights
from distensor.transport import DataPlane

MOST = 4


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(MOST) as opened:
        yield opened


def one_step(store: WeightStore, model: TwoStages, rank: int, micro_batches: int, *, keep: bool = True) -> None:
    """Both stages for each micro-batch, forward and backward; a rank with fewer takes part all the same."""
    store.begin(micro_batches)
    most = store.agree(micro_batches)
    store.expect([0, 1, 1, 0] * most)
    for micro in range(most):
        store.turn_to(0, gradients=False)
        hidden = model.lower(ids_of(rank, micro)) if micro < micro_batches else None
        store.turn_to(1, gradients=False)
        received = None if hidden is None else hidden.detach().requires_grad_()
        loss = None if received is None else model.upper(received)
        store.turn_to(1, gradients=True)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        store.turn_to(0, gradients=True)
        if hidden is not None and received is not None:
            hidden.backward(received.grad)  # type: ignore[no-untyped-call]
    store.release()
    if keep:
        store.finish()


def reference(ranks: int, counts: list[int]) -> TwoStages:
    model = TwoStages()
    for rank in range(ranks):
        for micro in range(counts[rank]):
            model.upper(model.lower(ids_of(rank, micro))).backward()  # type: ignore[no-untyped-call]
    return model


def close(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 1, 0, 2]])
def test_gradients_are_the_sums_of_one_process(planes: dict[int, DataPlane], ranks: int, counts: list[int]) -> None:
    def run(group: Any) -> dict[str, Tensor]:
        model = TwoStages()
        store = ShardedWeights(model.stages, group, alone=TIED)
        for _ in range(2):  # nothing of the first step stays in the second
            one_step(store, model, group.rank(), counts[group.rank()])
        assert store.updated["1/unused"].grad is None, "nobody has a gradient, so there is none"
        parts = {key: shard.grad for key, shard in store.updated.items() if shard.grad is not None}
        return store.whole(parts)

    expected = {key: p.grad for key, p in keyed(reference(ranks, counts).stages).items() if p.grad is not None}
    assert expected.keys() == {"0/embed", "0/first", "1/second", "1/bias", "1/scale", "1/head"}
    for found in in_group(planes, ranks, run):
        assert found.keys() == expected.keys()
        assert all(close(found[key], gradient) for key, gradient in expected.items())


@pytest.mark.parametrize("name", [name for name in OPTIONS if OptimizerSpec(name=name, lr=0.1).elementwise])
def test_every_elementwise_optimizer_trains_like_whole_copies(planes: dict[int, DataPlane], name: str) -> None:
    spec = OptimizerSpec(name=name, lr=0.01, options={"momentum": 0.9} if name == "sgd" else {}, ema=0.5)

    def run(group: Any, *, sharded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = TwoStages()
        store: WeightStore = (
            ShardedWeights(model.stages, group, alone=TIED) if sharded else ReplicatedWeights(model.stages, group)
        )
        updater = Updater(spec, store.updated)
        for _ in range(3):
            one_step(store, model, group.rank(), 1)
            updater.step(0.001, 0.25)
        return store.whole(store.updated), store.whole(updater.averages())

    cut = in_group(planes, 3, lambda group: run(group, sharded=True))
    whole = in_group(planes, 3, lambda group: run(group, sharded=False))
    for found, expected in zip(cut, whole, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert torch.equal(ours[key], tensor), (name, key)


def test_a_rank_keeps_its_part_and_nothing_else(planes: dict[int, DataPlane]) -> None:
    def run(group: Any) -> tuple[int, int, int, int]:
        model = TwoStages()
        store = ShardedWeights(model.stages, group)
        whole = sum(parameter.nbytes for parameter in keyed(model.stages).values())
        one_step(store, model, group.rank(), 1)
        alive = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in keyed(model.stages).values()}
        gradients = sum(p.grad.nbytes for p in keyed(model.stages).values() if p.grad is not None)
        return whole, store.held.weights, sum(alive.values()), gradients

    for whole, kept, alive, gradients in in_group(planes, 4, run):
        assert kept <= whole / 4 + 5 * 64, "a quarter, and the room between the parameters"
        assert (alive, gradients) == (0, 0), "the whole weights and gradients are gone"


def test_the_peak_is_parts_of_all_and_the_stages_at_hand(planes: dict[int, DataPlane]) -> None:
    def run(group: Any) -> tuple[int, int]:
        model = TwoStages()
        store = ShardedWeights(model.stages, group)
        one_step(store, model, group.rank(), 2)
        largest = max(sum(p.nbytes for p in stage.values()) for stage in model.stages.values())
        return store.held.peak, 4 * largest + 2 * store.held.weights

    for peak, most in in_group(planes, 3, run):
        assert most / 2 < peak <= most + 12 * 64


def test_the_next_stage_travels_while_one_is_used(planes: dict[int, DataPlane]) -> None:
    """Its gather is on its way before anybody turns to it; unannounced, it is gathered all the same."""

    def run(group: Any, announced: list[int]) -> list[list[bool]]:
        layers = [nn.Linear(3, 3) for _ in range(3)]
        store = ShardedWeights({stage: dict(layer.named_parameters()) for stage, layer in enumerate(layers)}, group)
        store.begin(1)
        store.expect(announced)
        seen = []
        for stage in (0, 1, 2):
            store.turn_to(stage, gradients=False)
            seen.append([layer.weight.untyped_storage().nbytes() > 0 for layer in layers])
            assert layers[stage](torch.ones(3)).shape == (3,)
        store.release()
        assert all(layer.weight.untyped_storage().nbytes() == 0 for layer in layers)
        return seen

    ahead = [[True, True, False], [False, True, True], [False, False, True]]
    assert in_group(planes, 2, lambda group: run(group, [0, 1, 2])) == [ahead] * 2
    never_used = in_group(planes, 2, lambda group: run(group, [0, 1, 2, 0]))
    assert never_used == [[*ahead[:2], [True, False, True]]] * 2
    each = [[True, False, False], [False, True, False], [False, False, True]]
    assert in_group(planes, 2, lambda group: run(group, [])) == [each] * 2


@pytest.mark.parametrize("same_stage", [True, False])
def test_bytes_on_the_wire_for_more_micro_batches(planes: dict[int, DataPlane], same_stage: bool) -> None:
    """With one stage on a rank they do not grow; where stages alternate, each turn gathers and reduces."""

    def run(group: Any, micro_batches: int) -> int:
        layer = nn.Linear(40, 50)
        other = nn.Linear(3, 3)
        store = ShardedWeights({0: dict(layer.named_parameters()), 1: dict(other.named_parameters())}, group)
        plane = planes[group.rank()]
        before = sum(link.bytes_sent for link in plane.stats().values())
        store.begin(micro_batches)
        for _ in range(store.agree(micro_batches)):
            store.turn_to(0, gradients=True)
            layer(torch.ones(2, 40)).sum().backward()
            if not same_stage:
                store.turn_to(1, gradients=False)
        store.release()
        store.finish()
        return sum(link.bytes_sent for link in plane.stats().values()) - before

    (one, *_), (four, *_) = (in_group(planes, 2, lambda group, m=m: run(group, m)) for m in (1, 4))  # type: ignore[misc]
    assert one > 2 * 4 * 2000 / 2
    assert four == pytest.approx(one if same_stage else 4 * one, rel=0.05)


def test_autograd_finds_the_weights_it_saved(planes: dict[int, DataPlane]) -> None:
    """A transposed view of a weight, saved by forward, is used in backward after the weight was given back."""

    def run(group: Any) -> Tensor:
        weight, other = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(2))
        store = ShardedWeights({0: {"weight": weight}, 1: {"other": other}}, group)
        x = torch.ones(1, 3, requires_grad=True)
        store.begin(1)
        store.turn_to(0, gradients=False)
        y = (x @ weight.t()).square().sum()
        store.turn_to(1, gradients=False)
        store.turn_to(0, gradients=True)
        y.backward()  # type: ignore[no-untyped-call]
        store.release()
        store.finish()
        assert x.grad is not None
        return x.grad

    x = torch.ones(1, 3, requires_grad=True)
    (x @ torch.arange(6.0).view(2, 3).t()).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(torch.equal(found, x.grad) for found in in_group(planes, 2, run) if x.grad is not None)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_and_wholes_belong_together(planes: dict[int, DataPlane], ranks: int) -> None:
    """More ranks than elements, scalars, an empty weight, several dtypes: what is cut comes back to the bit."""

    def run(group: Any) -> dict[str, tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(1)
        own: dict[str, Tensor] = {
            "vocabulary": nn.Parameter(torch.randn(131, 3, generator=random)),
            "one": nn.Parameter(torch.randn((), generator=random)),
            "empty": nn.Parameter(torch.randn(0, 4)),
            "half": nn.Parameter(torch.randn(7, 3, generator=random).bfloat16()),
            "wide": nn.Parameter(torch.randn(2, generator=random).double(), requires_grad=False),
        }
        before = {f"0/{name}": tensor.detach().clone() for name, tensor in own.items()}
        store = ShardedWeights({0: own}, group)
        parts = {key: store.part(key, tensor) for key, tensor in before.items()}
        assert all(torch.equal(part, store.updated[key]) for key, part in parts.items())
        found = store.whole(parts)
        return {key: (found[key], tensor) for key, tensor in before.items()}

    for found in in_group(planes, ranks, run):
        for ours, theirs in found.values():
            assert torch.equal(ours, theirs)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_copies_of_a_tied_weight_are_cut_alike(planes: dict[int, DataPlane]) -> None:
    """They lie in stages of different size; their gradients are summed part by part."""

    def run(group: Any) -> list[tuple[int, ...]]:
        store = ShardedWeights(TwoStages().stages, group, alone=TIED)
        return [tuple(store.updated[key].shape) for key in TIED]

    found = in_group(planes, 3, run)
    assert all(first == second for first, second in found)
    assert sum(first[0] for first, _ in found) >= 131 * 5


@pytest.mark.parametrize("frozen", [False, True])
def test_stages_with_nothing_to_train_take_part(planes: dict[int, DataPlane], frozen: bool) -> None:
    def run(group: Any) -> list[str]:
        only = {"frozen": nn.Parameter(torch.ones(5), requires_grad=False)} if frozen else {}
        store = ShardedWeights({0: {}, 1: only}, group)
        store.begin(1)
        for stage in (0, 1):
            store.turn_to(stage, gradients=True)
        store.release()
        store.finish()
        Updater(OptimizerSpec(name="sgd", lr=0.1), store.updated).step(0.1)
        return list(store.whole(store.updated))

    assert in_group(planes, 2, run) == [["1/frozen"] if frozen else []] * 2


def test_a_lost_rank_ends_the_wait_of_the_others() -> None:
    def run(group: Any) -> str:
        store = ShardedWeights({0: {"weight": nn.Parameter(torch.ones(9))}}, group)
        if group.rank() == 1:
            planes[1].close()
            return "gone"
        with pytest.raises(PeerLostError, match="rank 1"):
            store.turn_to(0, gradients=False)
        return "told"

    with planes_of(2) as planes:
        assert in_group(planes, 2, run) == ["told", "gone"]


def test_without_a_group_whole_copies_stay_as_they_are() -> None:
    model = TwoStages()
    store = ReplicatedWeights(model.stages, None)
    one_step(store, model, 0, 1)
    whole = sum(parameter.nbytes for parameter in keyed(model.stages).values())
    assert store.held.weights == whole
    assert store.held.peak == 2 * whole - model.first.bias.nbytes
    assert store.whole({"a": model.scale}) == {"a": model.scale}
    assert store.part("a", model.scale) is model.scale
    store.close()
