"""Learning-rate schedules: pure functions of the optimizer step, so that no layout and no restart can shift them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from distensor.core.errors import ConfigError
from distensor.optim.spec import check_learning_rate


class Curve(StrEnum):
    """How the rate goes once the warm-up is over."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    """Stable at the peak, then a linear decay over the last `decay_steps`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSchedule:
    """The learning rate of each optimizer step, whatever the number of replicas, micro-batches or batches in a step.

    Step s (1, 2, ...) of the `warmup_steps` runs at s / (warmup_steps + 1) of the peak, the next one at the peak; then
    the rate falls as `curve` says and would reach `min_lr` at step `total_steps` + 1; it stays there. These are the
    rates of torch.optim.lr_scheduler's LinearLR followed by ConstantLR, LinearLR or CosineAnnealingLR.

    Args:
        curve: "constant", "linear", "cosine" or "wsd".
        total_steps: optimizer steps of the whole run; None lets `Trainer.fit` fill it in.
        decay_steps: only of "wsd", the length of the decay; None for a tenth of `total_steps`.

    Raises:
        ConfigError: names each value and what would be right.
    """

    curve: Curve
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr: float = 0.0
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "curve", _curve(self.curve))
        for keyword, least in (("warmup_steps", 0), ("total_steps", 1), ("decay_steps", 1)):
            _check_steps(keyword, getattr(self, keyword), least)
        check_learning_rate(self.min_lr)
        if self.decay_steps is not None and self.curve is not Curve.WSD:
            raise ConfigError(f"decay_steps={self.decay_steps}: only 'wsd' has a decay of its own length")
        if self.total_steps is not None and self.warmup_steps + (self.decay_steps or 0) > self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} are more than "
                f"total_steps={self.total_steps}"
            )

    @property
    def needs_total(self) -> bool:
        """Whether the rates depend on a number of steps that is not known yet."""
        return self.total_steps is None and self.curve is not Curve.CONSTANT

    def with_total(self, steps: int) -> LrSchedule:
        """The schedule of a run of `steps` optimizer steps, unless it says the number itself."""
        return self if self.total_steps is not None else replace(self, total_steps=steps)

    def rate(self, step: int, peak: float) -> float:
        """The learning rate of optimizer step `step` (1, 2, ...) with `peak` as the highest.

        Raises:
            ConfigError: the number of steps is not known, or `min_lr` is above the peak.
        """
        if self.min_lr > peak:
            raise ConfigError(f"min_lr={self.min_lr}: expected at most lr={peak}")
        if step <= self.warmup_steps:
            return peak * step / (self.warmup_steps + 1)
        return self.min_lr + (peak - self.min_lr) * self._height(step)

    def _height(self, step: int) -> float:
        """1 at the peak, 0 at `min_lr`."""
        if self.curve is Curve.CONSTANT:
            return 1.0
        if self.total_steps is None:
            raise ConfigError(f"lr_schedule {self.curve.value!r}: set its total_steps, or train with Trainer.fit")
        length = self._decay_length(self.total_steps)
        done = min(max((step - 1 - self.total_steps + length) / max(length, 1), 0.0), 1.0)
        return (1.0 + math.cos(math.pi * done)) / 2.0 if self.curve is Curve.COSINE else 1.0 - done

    def _decay_length(self, total: int) -> int:
        after_warmup = total - self.warmup_steps
        if self.curve is not Curve.WSD:
            return after_warmup
        return min(after_warmup, -(-total // 10) if self.decay_steps is None else self.decay_steps)

    def to_json(self) -> dict[str, Any]:
        return {
            "curve": self.curve.value,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "min_lr": self.min_lr,
            "decay_steps": self.decay_steps,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LrSchedule:
        """Raises ConfigError for what `to_json` does not write."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ConfigError(f"lr_schedule {str(data)[:200]}: {error}") from error


def parse_lr_schedule(value: object) -> LrSchedule | Callable[[int], float] | None:
    """What `Trainer(lr_schedule=...)` takes: None, a name, a schedule, or a function of the step.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, str):
        return LrSchedule(curve=_curve(value))
    if value is None or isinstance(value, LrSchedule):
        return value
    if callable(value):
        return value
    raise ConfigError(f"lr_schedule={value!r}: expected {_NAMES}, an LrSchedule, a function of the step, or None")


_NAMES = ", ".join(repr(curve.value) for curve in Curve)


def _curve(value: object) -> Curve:
    if isinstance(value, str) and value in list(Curve):
        return Curve(value)
    raise ConfigError(f"lr_schedule={value!r}: expected one of {_NAMES}")


def _check_steps(keyword: str, value: object, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"{keyword}={value!r}: expected an integer of at least {least}")
