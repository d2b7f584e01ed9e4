"""The update rules against plain loops, workers that stay equal, state that goes on."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import distro_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from distensor.core.errors import ConfigError, FrameError
from distensor.optim.distro.adamw import DisTrOAdamW
from distensor.optim.distro.cosine import inverse, tiles_of, transform
from distensor.optim.distro.demo import DeMo, DisTrO
from distensor.optim.distro.exchange import Alone
from distensor.optim.distro.local import DiLoCo, SparseLoCo
from distensor.testing.exchange import Loses, Meeting, ThreadExchange

TRACES = Path(__file__).with_name("distro_traces.json")
Make = Callable[..., Any]
RULES: dict[str, Make] = {
    "distro_adamw": lambda ps, **kw: DisTrOAdamW(ps, lr=0.02, k=4, chunk=16, **kw),
    "distro_adamw_delayed": lambda ps, **kw: DisTrOAdamW(ps, lr=0.02, k=4, chunk=16, delay=True, **kw),
    "demo": lambda ps, **kw: DeMo(ps, lr=0.02, k=4, chunk=16, **kw),
    "distro": lambda ps, **kw: DisTrO(ps, lr=0.02, k=4, chunk=16, **kw),
    "diloco": lambda ps, **kw: DiLoCo(ps, lr=0.02, every=3, **kw),
    "sparseloco": lambda ps, **kw: SparseLoCo(ps, lr=0.02, every=3, k=4, chunk=16, **kw),
}


class Model(nn.Module):
    """Every rank from 0 to 4, a prime size, an empty tensor, a tied one, a frozen one, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.prime = nn.Parameter(torch.randn(13))
        self.first = nn.Linear(13, 5)
        self.tied = nn.Linear(13, 5)
        self.tied.weight = self.first.weight
        self.cube = nn.Parameter(torch.randn(2, 3, 5))
        self.kernel = nn.Parameter(torch.randn(2, 2, 3, 5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.prime) + self.tied(x) * self.scalar
        return (y * self.cube.sum((0, 1)) + y * self.kernel.sum((0, 1, 2))).tanh() * self.frozen.mean()


def run(
    make: Make,
    *,
    workers: int = 3,
    steps: int = 7,
    loses: Loses = lambda _r, _w: False,
    dtype: torch.dtype | None = None,
) -> list[list[list[Tensor]]]:
    """[worker][step] -> the weights that all have in common."""
    meeting = Meeting(workers, loses)
    models = [Model().to(dtype) if dtype else Model() for _ in range(workers)]
    results: list[list[list[Tensor]]] = [[] for _ in range(workers)]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            optimizer = make(models[rank].parameters(), exchange=ThreadExchange(rank, meeting))
            generator = torch.Generator().manual_seed(100 + rank)
            for _ in range(steps):
                results[rank].append(one_step(models[rank], optimizer, generator))
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    return results


def one_step(model: Model, optimizer: Any, generator: torch.Generator) -> list[Tensor]:
    optimizer.zero_grad()
    x = torch.randn(6, 13, generator=generator).to(model.scalar.dtype)
    model(x).square().mean().backward()
    optimizer.step()
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", RULES)
def test_workers_are_equal_to_the_bit(name: str) -> None:
    results = run(RULES[name])
    together = [step for step in range(7) if name not in ("diloco", "sparseloco") or step % 3 == 2]
    for step in together:
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0][step], other[step], strict=True))
    start, end = list(Model().parameters()), results[0][together[-1]]
    changed = [not torch.equal(a.detach(), b) for a, b in zip(start, end, strict=True)]
    names = [key for key, _ in Model().named_parameters()]
    # Weight decay moves a weight without a gradient, as AdamW does not: it skips it.
    assert all(changed[names.index(key)] for key in ("scalar", "prime", "first.weight", "cube", "kernel"))
    assert not changed[names.index("frozen")]
    assert not changed[names.index("empty")]


@pytest.mark.parametrize("name", ["distro_adamw", "distro_adamw_delayed", "demo", "distro"])
def test_lost_messages_cost_no_consistency(name: str) -> None:
    """A quarter of the messages is lost, for everybody: that is what `Exchange.gather` promises."""
    results = run(RULES[name], loses=lambda turn, rank: (turn * 5 + rank * 3) % 4 == 0)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][-1], other[-1], strict=True))


@pytest.mark.parametrize("name", RULES)
def test_golden_traces(name: str) -> None:
    """The sums of all weights after each step, as they were when the rule was checked against the loops below."""
    trace = [[round(float(w.double().sum()), 5) for w in weights] for weights in run(RULES[name])[0]]
    stored = json.loads(TRACES.read_text()) if TRACES.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        TRACES.write_text(json.dumps({**stored, name: trace}, indent=1) + "\n")
        return
    flat, expected = ([x for row in rows for x in row] for rows in (trace, stored[name]))
    assert flat == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("name", RULES)
def test_the_same_run_twice(name: str) -> None:
    first, second = run(RULES[name], steps=3), run(RULES[name], steps=3)
    assert all(torch.equal(a, b) for a, b in zip(first[0][-1], second[0][-1], strict=True))


def gradients(steps: int, workers: int, size: int) -> Tensor:
    return torch.randn(steps, workers, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def workers_of(make: Make, size: int, count: int) -> tuple[nn.Parameter, list[Any]]:
    weight = nn.Parameter(torch.linspace(-1, 1, size))
    return weight, [make([weight], exchange=Alone()) for _ in range(count)]


def drive(weight: nn.Parameter, optimizers: Sequence[Any], given_gradients: Tensor) -> None:
    """One step: the workers share one weight, since it is the same for all."""
    messages = []
    for optimizer, gradient in zip(optimizers, given_gradients, strict=True):
        weight.grad = gradient.float()
        messages.append(optimizer.propose())
    optimizers[0].apply(messages)


def test_distro_adamw_is_what_the_loops_say() -> None:
    """With an eps that keeps the first step's entries apart: they would all be one."""
    size, k, chunk = 45, 4, 16
    weight, optimizers = workers_of(lambda ps, **kw: DisTrOAdamW(ps, lr=0.1, eps=0.1, k=k, chunk=chunk, **kw), size, 3)
    expected = weight.tolist()
    plain = [reference.AdamWWorker(size) for _ in range(3)]
    for step in gradients(6, 3, size):
        drive(weight, optimizers, step)
        sent = [w.send(g.tolist(), 0.999, 0.1, k, chunk) for w, g in zip(plain, step, strict=True)]
        reference.step_adamw(expected, sent, 0.1, 0.01)
        assert weight.tolist() == pytest.approx(expected, abs=1e-5)


def test_demo_is_what_the_loops_say() -> None:
    size, k, chunk = 45, 4, 16
    weight, optimizers = workers_of(lambda ps, **kw: DeMo(ps, lr=0.1, k=k, chunk=chunk, **kw), size, 3)
    expected = weight.tolist()
    plain = [reference.DeMoWorker(size) for _ in range(3)]
    for step in gradients(6, 3, size):
        drive(weight, optimizers, step)
        sent = [w.send(g.tolist(), 0.1, 0.999, k, chunk) for w, g in zip(plain, step, strict=True)]
        reference.step_demo(expected, sent, 0.1)
        assert weight.tolist() == pytest.approx(expected, abs=1e-5)


def test_alone_and_whole_it_is_error_free_sign_descent() -> None:
    """With k = chunk nothing waits: what was not sent is only the rounding of the magnitude."""
    weight = nn.Parameter(torch.zeros(64))
    optimizer = DisTrOAdamW([weight], lr=1.0, weight_decay=0.0, k=64, chunk=64)
    weight.grad = torch.full((64,), 3.0)
    optimizer.step()
    assert weight.tolist() == [-1.0] * 64


def test_diloco_alone_with_outer_lr_one_is_adamw() -> None:
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = DiLoCo([ours], lr=0.1, every=2, outer_lr=1.0, outer_momentum=0.0)
    plain = torch.optim.AdamW([theirs], lr=0.1)
    for step in range(4):
        ours.grad = theirs.grad = torch.full((5,), float(step - 1))
        optimizer.step()
        plain.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_saved_state_goes_on(name: str) -> None:
    model = Model()
    optimizer = RULES[name](model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        one_step(model, optimizer, generator)
    other = copy.deepcopy(model)
    resumed = RULES[name](other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = torch.Generator()
    again.set_state(generator.get_state())
    for _ in range(4):
        first, second = one_step(model, optimizer, generator), one_step(other, resumed, again)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_half_precision_weights_keep_small_updates() -> None:
    model = Model().to(torch.bfloat16)
    optimizer = DisTrOAdamW(model.parameters(), lr=1e-4, k=16, chunk=16, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    before = model.prime.detach().clone()
    for _ in range(40):
        one_step(model, optimizer, generator)
    assert model.prime.dtype == torch.bfloat16
    assert not torch.equal(before, model.prime)
    assert optimizer.state[model.prime]["residual"].dtype == torch.float32
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.state[model.prime]["master"].dtype == torch.float32


@pytest.mark.parametrize("name", ["distro_adamw", "demo"])
def test_numbers_that_are_none_are_not_sent(name: str) -> None:
    weight, (bad, good) = workers_of(RULES[name], 16, 2)
    weight.grad = torch.full((16,), float("nan"))
    message = bad.propose()
    weight.grad = torch.ones(16)
    before = weight.detach().clone()
    bad.apply([message, good.propose()])
    assert bad.dropped == 1
    assert torch.isfinite(weight).all()
    assert not torch.equal(before, weight)
    weight.grad = torch.ones(16)
    assert bad.propose()  # the residual and the second moment are numbers again


def test_a_message_of_another_model_is_refused() -> None:
    weight, (one, _) = workers_of(RULES["distro_adamw"], 16, 2)
    other, (foreign, _) = workers_of(RULES["distro_adamw"], 17, 2)
    other.grad = torch.ones(17)
    before = weight.detach().clone()
    with pytest.raises(FrameError, match="other tensors"):
        one.apply([foreign.propose()])
    assert torch.equal(before, weight)


def test_a_step_under_way_cannot_be_saved() -> None:
    weight = nn.Parameter(torch.ones(16))
    optimizer = DisTrO([weight], k=4, chunk=16)
    weight.grad = torch.ones(16)
    optimizer.step()
    assert not torch.equal(weight, optimizer.shared_weights()[0])  # looked ahead
    with pytest.raises(ConfigError, match="settle"):
        optimizer.state_dict()
    optimizer.settle()
    assert torch.equal(weight, optimizer.shared_weights()[0])
    assert optimizer.state_dict()["state"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70), max_size=3))
def test_cosines_there_and_back(shape: list[int]) -> None:
    tiles = tiles_of(tuple(shape))
    tensor = torch.randn(shape)
    coefficients = transform(tensor, tiles)
    assert coefficients.shape == (tiles.coefficients,)
    assert torch.allclose(inverse(coefficients, tiles), tensor, atol=1e-5)
    assert torch.allclose(coefficients.norm(), tensor.norm(), rtol=1e-4, atol=1e-6)
    assert tiles.coefficients <= max(1, tensor.numel()) * 4


@pytest.mark.parametrize("wrong", [{"value_bits": 3}, {"k": 0}])
def test_wrong_options_are_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = "):
        DisTrOAdamW([nn.Parameter(torch.ones(4))], **wrong)


def test_an_exchange_that_never_comes_is_refused() -> None:
    with pytest.raises(ConfigError, match="every = 0"):
        DiLoCo([nn.Parameter(torch.ones(4))], every=0)
