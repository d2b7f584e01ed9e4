"""What capture refuses, in words, and what it takes: writes in place, no_grad, tied and frozen weights."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from program_harness import cut_module, eager, gradient_differences, loss_difference, run_cut, runners_of
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.errors import BatchError, CaptureError, StageMappingError, UnsupportedOpError
from distensor.program import capture, cut


def squared(out: Any, given: Any) -> Tensor:
    return F.mse_loss(out, given[1])


def pairs(rows: int = 5, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, size, generator=generator), torch.randn(rows, size, generator=generator)


class Body(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.between = types.MethodType(between, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


def body(between: Any) -> nn.Module:
    return Body(between).train()


STAGES = [["first"], ["second"]]


def assert_parity(model: nn.Module, stages: Any = None, batch: Any = None, loss: Any = squared) -> None:
    given = pairs() if batch is None else batch
    pieces = cut_module(model, given, stages, loss=loss)
    reference = eager(model, given, loss)
    runners = runners_of(pieces)
    for parts in (1, 2):
        ours = run_cut(pieces, runners, given, parts)
        assert loss_difference(ours, reference) <= 1e-6
        assert max(gradient_differences(ours, reference).values()) <= 2e-6


def _clone_then_write(self: Any, h: Tensor) -> Tensor:
    made = h.clone()
    made[:, 1:] = 3.0
    made[:, 0] += 1
    return made


def _write_a_view(self: Any, h: Tensor) -> Tensor:
    made = h * 2
    made.view(-1, 2, 2)[:, 0, 1].mul_(h[:, 0])
    made.unsqueeze(0).transpose(1, 2)[0, 0].add_(1)
    return made


def _stale_view(self: Any, h: Tensor) -> Tensor:
    made = h * 2
    view = made[:, :2]
    made.mul_(3)
    made[:, 0] = 1.0
    return torch.cat([view, made[:, 2:]], dim=1)


def _masked(self: Any, h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made.masked_fill_(h > 0, -1)
    made.copy_(h)
    return made + torch.empty(4).fill_(2.0)


def _put(self: Any, h: Tensor) -> Tensor:
    made = h.clone()
    rows = torch.arange(h.shape[0])
    made[rows, torch.zeros_like(rows)] = h[:, 1]
    return made.div_(2).relu_()


def _chain(self: Any, h: Tensor) -> Tensor:
    h = h + 0
    h += 1
    h *= 2
    return h.sub_(1).tanh_().mul(3)


def _no_grad(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.first(h).abs().mean(1, keepdim=True)
    return h / (1 + scale)


def _detached(self: Any, h: Tensor) -> Tensor:
    return h * h.detach().sigmoid()


def _pieces(self: Any, h: Tensor) -> Tensor:
    one, two = h.chunk(2, dim=1)
    parts = torch.stack([*one.unbind(1), *two.split(1, dim=1)[0].unbind(1)], dim=1)
    best, where = parts.max(dim=1)
    return h + best.unsqueeze(1) + where.float().unsqueeze(1)


def _sized(self: Any, h: Tensor) -> Tensor:
    rows, size = h.shape
    return h / size * size + torch.arange(size) / size + h.new_full((size,), 0.5) * (h.numel() // rows)


def _static_choice(self: Any, h: Tensor) -> Tensor:
    return h * 2 if h.shape[1] > 3 else h


def _constants(self: Any, h: Tensor) -> Tensor:
    chosen = torch.where(h > 0, h, torch.tensor(-0.5)) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return chosen.masked_fill(torch.ones(4, 4).tril()[1] == 0, float("-inf")).softmax(-1)


def _complex(self: Any, h: Tensor) -> Tensor:
    turned = torch.view_as_complex(h.view(-1, 2, 2)) * torch.polar(torch.ones(2), torch.arange(2.0))
    return torch.view_as_real(turned).flatten(1)


def _autocast_off(self: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.float() * 2


BETWEEN = (
    _clone_then_write,
    _write_a_view,
    _stale_view,
    _masked,
    _put,
    _chain,
    _no_grad,
    _detached,
    _pieces,
    _sized,
    _static_choice,
    _constants,
    _complex,
    _autocast_off,
)


@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__.strip("_"))
def test_ways_to_write_a_module(between: Any) -> None:
    assert_parity(body(between))
    assert_parity(body(between), STAGES)


def test_labels_given_as_the_inputs_themselves_stay_two_inputs() -> None:
    ids = torch.randn(5, 4)
    pieces = cut(capture(body(lambda self, h: h), (ids, ids), loss=squared))
    assert [spec.name for spec in pieces.batch_inputs] == ["inputs", "targets"]
    model = body(lambda self, h: h)
    reference = eager(model, pairs(), squared)
    assert loss_difference(run_cut(pieces, runners_of(pieces), pairs()), reference) <= 1e-6


def test_an_example_of_one_row_runs_with_many() -> None:
    model = body(lambda self, h: h.relu())
    pieces = cut(capture(model, pairs(1), loss=squared))
    runners = runners_of(pieces)
    for rows in (1, 2, 7):
        reference = eager(model, pairs(rows), squared)
        assert loss_difference(run_cut(pieces, runners, pairs(rows)), reference) <= 1e-6


def test_capture_leaves_the_module_as_it_was() -> None:
    model = body(_chain)
    before = copy.deepcopy(model.state_dict())
    capture(model, pairs(), loss=squared)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


class Tied(nn.Module):
    """One weight under two names, and used once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4)
        self.leave = nn.Linear(4, 4, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.enter(x)).relu()
        return self.leave(hidden) + F.linear(hidden, self.enter.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "stages",
    [None, [["enter", "middle", "leave"]], [["enter"], ["middle", "leave"]], [["enter"], ["middle"], ["leave"]]],
)
def test_tied_weights_in_one_stage_and_across(stages: Any) -> None:
    assert_parity(Tied().train(), stages)


def test_tied_groups_name_the_stages() -> None:
    pieces = cut_module(Tied().train(), pairs(), [["enter"], ["middle"], ["leave"]], loss=squared)
    assert [(group.name, group.stages) for group in pieces.tied] == [("enter.weight", (0, 2))]


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_frozen_stages_train_the_rest(frozen: str) -> None:
    model = body(lambda self, h: h.relu())
    for parameter in model.get_submodule(frozen).parameters():
        parameter.requires_grad_(False)
    assert_parity(model, STAGES)
    pieces = cut_module(model, pairs(), STAGES, loss=squared)
    assert pieces.programs[0].outputs[0].requires_grad is (frozen == "second")


def test_a_parameter_that_nothing_uses_stays_in_its_stage() -> None:
    model = body(lambda self, h: h)
    model.spare = nn.Linear(2, 2)
    pieces = cut_module(model, pairs(), [["first"], ["second", "spare"]], loss=squared)
    assert "spare.weight" in {spec.name for spec in pieces.programs[1].parameters}
    assert_parity(model, [["first", "spare"], ["second"]])


def test_a_value_that_crosses_several_borders_is_handed_on() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            first = hidden = self.layers[0](x)
            for layer in self.layers[1:]:
                hidden = layer(hidden).relu()
            return hidden + first  # type: ignore[no-any-return]

    stages = [[f"layers.{index}"] for index in range(4)]
    assert_parity(Skip().train(), stages)
    pieces = cut_module(Skip().train(), pairs(), stages, loss=squared)
    assert [len(program.outputs) for program in pieces.programs] == [1, 2, 2, 0]
    names = [{spec.name for spec in program.outputs} for program in pieces.programs[:3]]
    assert set.intersection(*names) == {"%linear"}


def test_batch_norm_that_is_frozen_is_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
    model[1](torch.randn(50, 4))
    model[1].eval()
    assert_parity(model, [["0", "1"], ["2"]])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(x)  # type: ignore[no-any-return]


def _item(self: Any, h: Tensor) -> Tensor:
    return h * 2 if h.sum().item() > 0 else h


def _branch(self: Any, h: Tensor) -> Tensor:
    return h * 2 if h.sum() > 0 else h


def _nonzero(self: Any, h: Tensor) -> Tensor:
    return h + h[h > 0].sum()


def _custom(self: Any, h: Tensor) -> Tensor:
    return torch.fft.fft(h).real


def _view_of_a_diagonal(self: Any, h: Tensor) -> Tensor:
    made = h * 2
    made.diagonal().add_(1)
    return made


def _own_generator(self: Any, h: Tensor) -> Tensor:
    return h + torch.randn(4, generator=torch.Generator())


def _mixed_precision(self: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return torch.mm(h, h.T).float() @ h


def _raises(self: Any, h: Tensor) -> Tensor:
    raise ValueError("the user's own mistake")


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (_item, CaptureError, "depends on the values of a tensor"),
    (_branch, CaptureError, "depends on the values of a tensor"),
    (_nonzero, CaptureError, r"depends on the values of a tensor|not in the table"),
    (_custom, UnsupportedOpError, r"operation aten\.\w*fft\w*\.default in module '\(root\)' is not in the table"),
    (_view_of_a_diagonal, CaptureError, "writes in place into a view made by aten.diagonal"),
    (_own_generator, CaptureError, "enerator"),
    (_mixed_precision, CaptureError, r"autocast to torch\.float16"),
    (_raises, CaptureError, "the user's own mistake"),
]


@pytest.mark.parametrize(("between", "error", "message"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_what_no_stage_can_do_is_refused_by_name(between: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        capture(body(between), pairs(), loss=squared)


def test_an_operation_outside_the_table_names_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), _Fourier())).train()
    with pytest.raises(UnsupportedOpError, match=r"aten\._?fft\w*\.default in module '1\.1'"):
        capture(model, pairs(), loss=squared)


class _Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).abs()


def test_batch_norm_in_training_is_refused_by_name() -> None:
    for layer in (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(4, 4), layer).train()
        with pytest.raises(CaptureError, match=r"module '1' .*(LayerNorm|GroupNorm)"):
            capture(model, pairs(), loss=squared)


def test_a_buffer_that_forward_writes_is_named() -> None:
    with pytest.raises(CaptureError, match="writes into 'seen' during forward"):
        capture(Counting().train(), pairs(), loss=squared)


def test_eval_mode_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"module\.train\(\)"):
        capture(body(_chain).eval(), pairs(), loss=squared)


def test_a_fixed_number_of_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="fixes the number of rows of 'inputs' to 5"):
        capture(body(lambda self, h: h + torch.zeros(5, 4)), pairs(), loss=squared)


def test_a_module_without_gradients_is_refused() -> None:
    model = body(lambda self, h: h).requires_grad_(False)
    with pytest.raises(CaptureError, match="no parameter that requires a gradient"):
        capture(model, pairs(), loss=squared)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.randn(5, 4), torch.randn(4, 4)), r"same number of rows.*'inputs': 5, 'targets': 4"),
        ({}, "holds no tensor"),
        ((torch.randn(5, 4), object()), "targets is a object"),
        ((torch.randn(0, 4), torch.randn(0, 4)), "'inputs' of the batch is empty"),
        ((torch.randn(5, 4).to(torch.float8_e4m3fn), torch.randn(5, 4)), "float8_e4m3fn; supported are"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        capture(body(lambda self, h: h), batch, loss=squared)


def test_a_module_without_a_loss_is_told_what_to_return() -> None:
    with pytest.raises(BatchError, match="loss"):
        capture(body(lambda self, h: h), torch.randn(5, 4))


def test_stages_out_of_order_are_refused() -> None:
    with pytest.raises(StageMappingError, match=r"module 'first' is in stage 1|module 'second' is in stage 0"):
        cut_module(body(lambda self, h: h), pairs(), [["second"], ["first"]], loss=squared)


def test_a_mapping_by_hand_is_checked_too() -> None:
    captured = capture(body(lambda self, h: h), pairs(), loss=squared)
    with pytest.raises(StageMappingError, match=r"no stage for 'second\.bias', 'second\.weight'"):
        cut(captured, {"first": 0})
    with pytest.raises(StageMappingError, match=r"stages \[1\] hold nothing"):
        cut(captured, {"first": 0, "second": 2})
    assert len(cut(captured, {"first": 0, "second.weight": 1, "second.bias": 1}).programs) == 2


def test_a_weight_that_changed_since_capture_is_refused() -> None:
    model = body(lambda self, h: h)
    pieces = cut(capture(model, pairs(), loss=squared))
    model.double()
    with pytest.raises(CaptureError, match=r"'first\.weight' is torch\.float64 \[4, 4\] now and was float32 \[4, 4\]"):
        pieces.weights(0)
