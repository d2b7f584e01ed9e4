"""What a rank says of itself when an epoch begins, and what the driver says back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distensor.core.errors import ProgramRejectedError
from distensor.core.numbers import is_finite
from distensor.node.world_sums import WorldSums

if TYPE_CHECKING:
    from distensor.node.engine import ShardEngine
    from distensor.node.step_report import StepReport


def status_of(engine: ShardEngine) -> dict[str, Any]:
    """How far this rank got.

    `step` is the newest that it committed, None where it holds nothing; `sums` are what all ranks added up for it;
    `prepared` is a step that lacks nothing but those sums; `exchanges` counts those of replicas that exchange updates,
    `missing` the weights that have not come yet to a rank that takes part already.
    """
    if not engine.loaded:
        return {"step": None, "prepared": None, "sums": None, "exchanges": 0, "missing": 0}
    done, ready = engine.decided, engine.prepared
    return {
        "step": 0 if done is None else done.number,
        "prepared": None if ready is None else ready.number,
        "sums": None if done is None or done.report is None else _sums_fields(done.report.sums),
        "exchanges": engine.exchanges,
        "missing": 0 if engine.filling is None else engine.filling.left,
    }


def _sums_fields(sums: WorldSums | None) -> dict[str, Any] | None:
    """None where each replica has sums of its own: those are of no use to another."""
    if sums is None or len(sums.weights) > 1:
        return None
    return {"loss": sums.losses[0], "weight": sums.weights[0], "norm": sums.norms[0]}


def parse_resolve(meta: Mapping[str, Any]) -> tuple[int, WorldSums | None]:
    """The number of the step, and its sums; None where each replica has its own. Raises ProgramRejectedError."""
    step, sums = meta.get("step"), meta.get("sums")
    if type(step) is int and sums is None:
        return step, None
    numbers = [sums.get(key) for key in ("loss", "weight", "norm")] if isinstance(sums, dict) else []
    if type(step) is not int or len(numbers) != 3 or not all(map(is_finite, numbers)):
        raise ProgramRejectedError(f"resolve: step={str(step)[:20]}, sums={str(sums)[:100]}")
    loss, weight, norm = (float(number) for number in numbers if number is not None)
    return step, WorldSums(losses=(loss,), weights=(weight,), norms=(norm,), place=0)


def report_fields(report: StepReport) -> dict[str, Any]:
    """What the driver is told of a step."""
    return {
        "loss": finite(report.loss),
        "weight": report.weight,
        "grad_norm": finite(report.grad_norm),
        "compute_seconds": report.compute_seconds,
        "sync_seconds": report.sync_seconds,
        "wait_seconds": report.wait_seconds,
        "committed": report.committed,
        "sketch": sketch_fields(report.sketch),
        "noticed": None if report.noticed is None else report.noticed.to_json(),
        "memory": {
            "weights": report.held.weights,
            "optimizer": report.optimizer_bytes,
            "peak": report.held.peak + report.optimizer_bytes,
        },
    }


def sketch_fields(sketch: Mapping[str, tuple[float, float]] | None) -> dict[str, list[float | None]] | None:
    """As JSON has it."""
    return None if sketch is None else {key: [finite(number) for number in pair] for key, pair in sketch.items()}


def finite(value: float) -> float | None:
    """JSON has no NaN; None says 'not a number' and is never mistaken for a loss."""
    return value if value - value == 0 else None
