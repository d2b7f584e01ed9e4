"""Learning rates of a fit, counted in optimizer steps whatever the layout, and the words of Trainer that go with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distensor.core import ParallelConfig
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.nn import DistributedModel
from distensor.optim import LrSchedule
from distensor.optim.schedules import Curve
from distensor.training import StepResult, Trainer
from distensor.training.rates import rate_of


class Recorder(Trainer):
    """A trainer whose steps only ask for their learning rate."""

    def step(self, *batches: Any, total_steps: int | None = None) -> StepResult:
        rate = rate_of(self._lr_schedule, self.lr, self._step + 1)
        self._step += 1
        return StepResult(
            step=self._step, loss=1.0, tokens=1, grad_norm=1.0, lr=rate, bytes_sent=0, bytes_received=0,
            seconds=1.0, compute_seconds=1.0, sync_seconds=0.0, wait_seconds=0.0,
        )  # fmt: skip


def recorder(**options: Any) -> Recorder:
    options = {"parallel": ParallelConfig(), "progress": False, **options}
    return Recorder(DistributedModel(nn.Linear(2, 1)), **options)


def rates(trainer: Trainer, data: Any, **words: Any) -> list[float]:
    return [result.lr for result in trainer.fit(data, **words).steps]


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize(("accumulate", "batches"), [(1, 10), (3, 30), (3, 28)])
def test_the_rates_depend_on_optimizer_steps_alone(data_parallel: int, accumulate: int, batches: int) -> None:
    """DAT-05: ten steps of linear decay, the last window of three batches full or not."""
    trainer = recorder(
        lr=1.0, lr_schedule="linear", accumulate=accumulate, parallel=ParallelConfig(data_parallel=data_parallel)
    )
    assert rates(trainer, list(range(batches))) == pytest.approx([1.0 - step / 10 for step in range(10)])


def test_a_number_of_steps_is_taken_from_the_first_fit_alone() -> None:
    trainer = recorder(lr=1.0, lr_schedule="linear")
    assert rates(trainer, list(range(8)), max_steps=4) == [1.0, 0.75, 0.5, 0.25]
    assert rates(trainer, list(range(2))) == [0.0, 0.0], "the schedule is over"


def test_data_without_a_length_needs_the_number_of_steps() -> None:
    with pytest.raises(ConfigError, match=r"'cosine'.*no length.*max_steps"):
        recorder(lr_schedule="cosine").fit(iter(range(3)))
    assert rates(recorder(lr=1.0, lr_schedule="cosine"), iter(range(3)), max_steps=1) == [1.0]
    given = LrSchedule(curve=Curve.LINEAR, total_steps=4)
    assert rates(recorder(lr=1.0, lr_schedule=given), iter(range(2))) == [1.0, 0.75]
    assert rates(recorder(lr=0.5, lr_schedule="constant"), iter(range(2))) == [0.5, 0.5]


def test_a_function_of_the_step_is_asked_with_the_step() -> None:
    assert rates(recorder(lr_schedule=lambda step: 1 / step), list(range(3))) == [1.0, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_schedule": "polynomial"}, "polynomial.*'cosine'"),
        ({"ema": 1.5}, "ema=1.5"),
        ({"optimizer_options": {"no_decay": ["wieght"]}}, "wieght.*nearest.*weight"),
        ({"optimizer": "muon"}, "muon.*bias"),
        ({"optimizer": "lbfgs"}, "lbfgs"),
        ({"optimizer": "adafactor", "sync": "zero3"}, "adafactor.*zero3.*slice"),
    ],
)
def test_words_are_refused_before_anything_happens(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        recorder(**options)
    assert isinstance(caught.value, UnsupportedOptionError) == (options.get("optimizer") in ("lbfgs", "adafactor"))


def test_an_average_that_is_not_kept_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="ema="):
        recorder().ema_state_dict()
    trainer = recorder(ema=0.9)
    assert torch.equal(trainer.ema_state_dict()["weight"], trainer.model.module.state_dict()["weight"])
