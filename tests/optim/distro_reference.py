"""The update rules written out with loops over numbers, as slow and as plain as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = list[float]


def kept_of(length: int, k: int, chunk: int) -> int:
    return min(length, max(1, round(length * k / chunk)))


def rounded_magnitude(value: float) -> float:
    """The nearest quarter of a power of two, by its logarithm."""
    return 0.0 if value == 0.0 else 2.0 ** (round(4 * math.log2(value)) / 4)


def take(residual: Vector, k: int, chunk: int) -> Vector:
    """What one worker sends of a residual, which loses it."""
    sent = [0.0] * len(residual)
    for start in range(0, len(residual), chunk):
        row = range(start, min(start + chunk, len(residual)))
        best = sorted(row, key=lambda i: -abs(residual[i]))[: kept_of(len(row), k, chunk)]
        magnitude = rounded_magnitude(sum(abs(residual[i]) for i in best) / len(best))
        for i in best:
            sent[i] = math.copysign(magnitude, residual[i])
    for i, value in enumerate(sent):
        residual[i] -= value
    return sent


class AdamWWorker:
    """One worker's residual and second moment, for one tensor."""

    def __init__(self, size: int) -> None:
        self.residual = [0.0] * size
        self.second = [0.0] * size
        self.steps = 0

    def send(self, gradient: Sequence[float], beta: float, eps: float, k: int, chunk: int) -> Vector:
        self.steps += 1
        for i, g in enumerate(gradient):
            self.second[i] = beta * self.second[i] + (1 - beta) * g * g
            self.residual[i] += g / (math.sqrt(self.second[i] / (1 - beta**self.steps)) + eps)
        return take(self.residual, k, chunk)


def step_adamw(weights: Vector, sent: Sequence[Vector], lr: float, decay: float) -> None:
    for i in range(len(weights)):
        mean = sum(worker[i] for worker in sent) / len(sent)
        weights[i] = weights[i] * (1 - lr * decay) - lr * mean


def dct(vector: Sequence[float]) -> Vector:
    """Orthonormal, type II."""
    n = len(vector)
    raw = [sum(x * math.cos(math.pi / n * (i + 0.5) * k) for i, x in enumerate(vector)) for k in range(n)]
    return [x * math.sqrt((1 if k == 0 else 2) / n) for k, x in enumerate(raw)]


def inverse_dct(coefficients: Sequence[float]) -> Vector:
    n = len(coefficients)
    scaled = [c * math.sqrt((1 if k == 0 else 2) / n) for k, c in enumerate(coefficients)]
    return [sum(c * math.cos(math.pi / n * (i + 0.5) * k) for k, c in enumerate(scaled)) for i in range(n)]


class DeMoWorker:
    """One worker's momentum, for one vector of at most 64 elements."""

    def __init__(self, size: int) -> None:
        self.momentum = [0.0] * size

    def send(self, gradient: Sequence[float], lr: float, decay: float, k: int, chunk: int) -> Vector:
        self.momentum = [decay * m + lr * g for m, g in zip(self.momentum, gradient, strict=True)]
        coefficients = dct(self.momentum)
        sent = take(coefficients, k, chunk)
        self.momentum = inverse_dct(coefficients)
        return sent


def step_demo(weights: Vector, sent: Sequence[Vector], lr: float) -> None:
    size = len(weights)
    totals = [sum(worker[i] for worker in sent) for i in range(size)]
    senders = [max(1, sum(worker[i] != 0.0 for worker in sent)) for i in range(size)]
    change = inverse_dct([total / count for total, count in zip(totals, senders, strict=True)])
    for i in range(size):
        weights[i] -= lr * math.copysign(1.0, change[i]) if change[i] else 0.0
