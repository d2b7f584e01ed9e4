"""Recomputation: less is kept, and gradients are equal to the bit: dropout, split backward and collectives included."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.compute import Precision, Recompute
from distensor.core.errors import ConfigError
from distensor.core.parallel import Axis
from distensor.program import Cut, Source, StageProgram, StageRunner, WeightGradients, capture, cut
from distensor.program.axes import AxisGroup
from distensor.program.expressions import Size
from distensor.program.recomputation import Segment, check_recompute, layer_of, segments
from distensor.program.values import AxisSpec, Dim, DType, InputSpec, Node, Ref, ValueSpec, WeightRef, WeightSpec
from distensor.testing.axes import Grid

LAYERS, WIDTH, ROWS = 4, 16, 64
HIDDEN_BYTES = ROWS * WIDTH * 4
MODES = (Recompute.LAYER, Recompute.STAGE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.25, self.training)
        return x + F.softmax(self.down(hidden), -1)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden).square().mean()  # type: ignore[no-any-return]


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture(scope="module", params=list(Precision))
def pieces(request: pytest.FixtureRequest) -> Cut:
    return cut(capture(Deep().train(), rows(0), precision=request.param))


def runner_of(pieces: Cut, mode: Recompute, *, split: bool = False) -> StageRunner:
    return StageRunner(pieces.programs[0], pieces.weights(0), split_backward=split, recompute=mode)


def loss_of(runner: StageRunner, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
    return runner.forward({"x": batch["x"]}, **options)[str(runner.program.loss)]


def backward(loss: Tensor, **options: Any) -> None:
    torch.autograd.backward(loss, **options)


def gradients(runner: StageRunner) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in runner.parameters.items()}


def assert_same(ours: StageRunner, theirs: StageRunner) -> None:
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        reference = expected[name]
        assert gradient is not None
        assert reference is not None
        assert torch.equal(gradient, reference), name


def test_layers_are_the_modules_up_to_the_first_number() -> None:
    names = ["", "model.norm", "model.layers.3.mlp.0", "0", "h.12"]
    assert [layer_of(name) for name in names] == [None, None, "model.layers.3", "0", "h.12"]


def test_segments_follow_the_layers_and_know_what_they_read() -> None:
    modules = ["embed", "layers.0.a", "layers.0.b", "layers.1", "head"]
    reads, writes = [[0, 9], [1], [2, 1, 9], [3, 1], [4]], [1, 2, 3, 4, 5]
    assert segments(modules, reads, writes, {9}, Recompute.LAYER) == (
        Segment(start=0, stop=1),
        Segment(start=1, stop=3, inputs=(1,)),
        Segment(start=3, stop=4, inputs=(3, 1)),
        Segment(start=4, stop=5),
    )
    assert segments(modules, reads, writes, {9}, Recompute.STAGE) == (Segment(start=0, stop=5, inputs=(0,)),)
    assert segments(modules, reads, writes, {9}, Recompute.NONE) == (Segment(start=0, stop=5),)


def test_a_model_without_layers_is_refused_by_name() -> None:
    check_recompute(Recompute.LAYER, ["embed", "layers.0.mlp"])
    check_recompute(Recompute.STAGE, ["embed"])
    with pytest.raises(ConfigError, match=r"recompute='layer'.*'stage'"):
        check_recompute(Recompute.LAYER, ["embed", "block"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_gradients_are_equal_to_the_bit(pieces: Cut, mode: Recompute, in_flight: int) -> None:
    """Several micro-batches wait at once, each with dropout of its own."""
    plain, light = runner_of(pieces, Recompute.NONE), runner_of(pieces, mode)
    for runner in (plain, light):
        losses = [loss_of(runner, rows(seed), seed=seed) for seed in range(in_flight)]
        for loss in losses:
            backward(loss)
    assert_same(light, plain)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_kept_goes_backward_twice(pieces: Cut, mode: Recompute) -> None:
    plain, light = runner_of(pieces, Recompute.NONE), runner_of(pieces, mode)
    for runner in (plain, light):
        loss = loss_of(runner, rows(1), seed=1)
        backward(loss, retain_graph=True)
        backward(loss)
    assert_same(light, plain)


@pytest.mark.parametrize("mode", MODES)
def test_weight_gradients_that_wait_are_the_same(pieces: Cut, mode: Recompute) -> None:
    plain, light = runner_of(pieces, Recompute.NONE, split=True), runner_of(pieces, mode, split=True)
    for runner in (plain, light):
        waiting = []
        for seed in range(2):
            put_off = WeightGradients()
            backward(loss_of(runner, rows(seed), seed=seed, put_off=put_off))
            waiting.append(put_off)
        for put_off in waiting:
            put_off.run()
    assert_same(light, plain)


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_special(pieces: Cut, mode: Recompute) -> None:
    with torch.no_grad():
        loss = loss_of(runner_of(pieces, mode), rows(1), training=False)
        assert torch.equal(loss, loss_of(runner_of(pieces, Recompute.NONE), rows(1), training=False))


def kept_bytes(make: Callable[[], Any]) -> int:
    """Bytes of tensors that live after `make` and did not before; what autograd holds is made visible to gc."""
    before = _storages()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
        held = make()
    after = _storages()
    assert held is not None
    return sum(size for pointer, size in after.items() if pointer not in before)


def _storages() -> dict[int, int]:
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    found = [item for item in tensors if item.layout is torch.strided]  # other tests may have left sparse ones
    return {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}


@pytest.mark.parametrize("split", [False, True])
def test_what_is_kept_is_the_inputs(split: bool) -> None:
    pieces = cut(capture(Deep().train(), rows(0)))
    kept: dict[Recompute, int] = {}
    for mode in Recompute:
        runner = runner_of(pieces, mode, split=split)
        put_off = WeightGradients() if split else None
        loss_of(runner, rows(5), put_off=put_off)
        kept[mode] = kept_bytes(lambda runner=runner, put_off=put_off: loss_of(runner, BATCH, put_off=put_off))  # type: ignore[misc]
        expected = {Recompute.NONE: 0, Recompute.LAYER: LAYERS * HIDDEN_BYTES, Recompute.STAGE: HIDDEN_BYTES}
        assert runner.kept_bytes == expected[mode]
    small = 1 << 10
    assert kept[Recompute.STAGE] < small, "the batch is the caller's"
    # What first and last keep: the results of first, of tanh and of the last layer; each layer its input.
    assert kept[Recompute.LAYER] < (LAYERS + 3) * HIDDEN_BYTES + small
    # Each block at least: up, gelu, mask and dropout (4 x 4), norm, softmax and sum.
    assert kept[Recompute.NONE] > LAYERS * 14 * HIDDEN_BYTES


BATCH = rows(5)


def test_what_came_back_is_given_up_layer_by_layer() -> None:
    """While the first layer goes backward, nothing of the last one is there any more."""
    pieces = cut(capture(Deep().train(), rows(0)))
    runner = runner_of(pieces, Recompute.LAYER)
    seen: list[int] = []
    before = _storages()
    weight = runner.parameters["layers.0.norm.weight"]
    weight.register_hook(lambda _: seen.append(sum(n for p, n in _storages().items() if p not in before)))  # type: ignore[no-untyped-call]
    backward(loss_of(runner, BATCH))
    (held,) = seen
    grown = sum(value.nbytes for value in runner.parameters.values())
    assert held < grown + 20 * HIDDEN_BYTES


def _tp_program(rank: int) -> StageProgram:
    """Two layers, each tanh(x * w) summed over tp; every sum is entered again."""
    nodes: list[Node] = []
    source = "x"
    for layer in range(2):
        module = f"layers.{layer}"

        def add(op: str, out: str, module: str = module, **args: Any) -> str:
            nodes.append(Node(op=op, args=args, out=(out,), module=module))
            return out

        entered = add("dist.enter.default", f"%enter{layer}", self=Ref(source), axis="tp")
        made = add("aten.mul.Tensor", f"%mul{layer}", self=Ref(entered), other=WeightRef(f"w{layer}"))
        bent = add("aten.tanh.default", f"%tanh{layer}", self=Ref(made))
        source = add("dist.reduce.default", f"%sum{layer}", self=Ref(bent), axis="tp")
        source = add("aten.sin.default", f"%sin{layer}", self=Ref(source))
    nodes.append(Node(op="aten.sum.default", args={"self": Ref(source)}, out=("%loss",)))
    x = ValueSpec(name="x", dtype=DType.FLOAT32, shape=(Size("batch"), 3))
    weights = (WeightSpec(name=f"w{layer}", dtype=DType.FLOAT32, shape=(3,), requires_grad=True) for layer in range(2))
    return StageProgram(
        stage=0,
        stages=1,
        dims=(Dim(name="batch", minimum=1, maximum=None, example=2),),
        inputs=(InputSpec(value=x, source=Source.BATCH),),
        outputs=(),
        parameters=tuple(weights),
        buffers=(),
        nodes=tuple(nodes),
        loss="%loss",
        weight="%loss",
        axes=(AxisSpec(name="tp", size=2, rank=rank),),
    )


def _on_two_ranks(mode: Recompute) -> tuple[list[list[Tensor]], list[str]]:
    """Gradients of each rank with two micro-batches in flight, and the collectives in order."""

    def run(place: Mapping[Axis, int], groups: Mapping[Axis, AxisGroup]) -> list[Tensor]:
        rank = place[Axis.TP]
        weights = {f"w{layer}": torch.linspace(0.1, 0.9, 3) + layer - rank for layer in range(2)}
        runner = StageRunner(_tp_program(rank), weights, axes=groups, recompute=mode)
        for loss in [loss_of(runner, {"x": torch.ones(rows, 3)}) for rows in (2, 3)]:
            backward(loss)
        return [gradient for gradient in gradients(runner).values() if gradient is not None]

    grid = Grid({Axis.TP: 2}, timeout=20.0)
    found = grid.run(run)
    (meeting,) = grid.meetings.values()
    return found, meeting.calls


@pytest.mark.parametrize("mode", MODES)
def test_collectives_run_again_in_the_same_order_on_all_ranks(mode: Recompute) -> None:
    expected, plain = _on_two_ranks(Recompute.NONE)
    found, calls = _on_two_ranks(mode)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert len(plain) == 2 * (2 + 1), "a sum for each layer; backward: one for the second `enter`, x has no gradient"
    assert len(calls) == len(plain) + 2 * 2, "both sums of both micro-batches run once more"
