"""Whole runs: they keep every promise, and a seed is one run for ever."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest
from planted_bugs import a_machine_that_comes_again_is_a_new_node, slots_that_are_taken_are_given_again

from distensor.core.errors import ConfigError
from distensor.testing.simulation import Fault, FaultKind, Outcome, Promise, Settings, ViolationError, run
from distensor.testing.simulation.cli import main
from distensor.testing.simulation.shrinking import shrunk

Python = Callable[..., "subprocess.CompletedProcess[str]"]

SHORT = Settings(faulty=40.0, every=2.5, settle=400.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_keeps_every_promise(seed: int) -> None:
    outcome = run(replace(SHORT, seed=seed))
    assert outcome.violation is None, f"{outcome.violation}\n{outcome.command}"
    assert outcome.counts["credited"] > 0, "nothing was trained: the run shows nothing"
    assert outcome.counts["jobs"] > 1


def test_on_sqlite_torn_at_crashes() -> None:
    outcome = run(replace(SHORT, seed=5, sqlite=True))
    assert outcome.violation is None, f"{outcome.violation}\n{outcome.command}"


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    one, again, other = (run(replace(SHORT, seed=seed, steps=400)) for seed in (7, 7, 8))
    assert (one.digest, one.steps) == (again.digest, again.steps)
    assert one.digest != other.digest


def test_on_either_store_a_seed_is_the_same_run_until_the_first_crash() -> None:
    quiet = replace(SHORT, faults=(), steps=300)
    assert run(quiet).digest == run(replace(quiet, sqlite=True)).digest


def test_another_process_with_another_order_of_sets_repeats_it(python: Python) -> None:
    words = ("-m", "distensor.testing.simulation", "--seed", "7", "--steps", "400")
    told = [python(*words, env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    digests = [re.findall(r"trace ([0-9a-f]{16})", text) for text in told]
    assert digests == [[run(Settings(seed=7, steps=400)).digest[:16]]] * 2


def test_a_failing_seed_fails_again_at_the_same_event_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slots_that_are_taken_are_given_again(monkeypatch)
    failed = run(replace(SHORT, faults=()))
    assert failed.violation is not None
    again = run(replace(failed.settings, steps=failed.steps))
    assert again.violation is not None
    assert (str(again.violation), again.digest) == (str(failed.violation), failed.digest)
    assert run(replace(failed.settings, steps=failed.violation.step - 1)).violation is None


def test_the_command_line_tells_what_broke_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slots_that_are_taken_are_given_again(monkeypatch)
    assert main(["--seed", "3", "--faulty", "20", "--faults", "none"]) == 1
    told = capsys.readouterr().out
    assert "BROKEN" in told
    assert "SLOTS at step" in told
    (command,) = re.findall(r"  again: python -m distensor.testing.simulation (.*)", told)[-1:]
    assert main(command.split()) == 1, "the printed command does not fail"
    assert "SLOTS at step" in capsys.readouterr().out


def test_the_command_line_of_a_good_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "4", "--seeds", "2", "--steps", "60", "--trace"]) == 0
    told = capsys.readouterr().out
    assert told.count("kept") == 2
    assert "node-0     starts" in told
    with pytest.raises(ConfigError, match="--faults 'x'"):
        main(["--faults", "x"])


def _failing_with(needed: set[int], faults: int) -> tuple[list[tuple[int, ...] | None], object]:
    tried: list[tuple[int, ...] | None] = []

    def pretend(settings: Settings) -> Outcome:
        """A run that fails exactly when the needed faults are there."""
        tried.append(settings.faults)
        numbers = range(faults) if settings.faults is None else settings.faults
        broken = ViolationError(Promise.SLOTS, "too many", step=90, seconds=50.0) if needed <= set(numbers) else None
        return Outcome(
            settings=settings,
            violation=broken,
            digest="",
            steps=90,
            seconds=50.0,
            real=0.0,
            faults=tuple(_fault(number) for number in numbers),
            counts={},
        )

    return tried, pretend


def _fault(number: int) -> Fault:
    return Fault(number=number, at=float(number), kind=FaultKind.RESET, seconds=1.0, draw=0.5, size=0.0)


def test_shrinking_leaves_the_faults_that_are_needed() -> None:
    tried, pretend = _failing_with({3, 17}, 30)
    small = shrunk(pretend(Settings()), run=pretend)  # type: ignore[operator, arg-type]
    assert small.settings.faults == (3, 17)
    assert "--faults 3,17" in small.command
    assert len(tried) < 60


def test_shrinking_a_failure_that_needs_no_fault() -> None:
    _, pretend = _failing_with(set(), 9)
    assert shrunk(pretend(Settings()), run=pretend).settings.faults == ()  # type: ignore[operator, arg-type]


def test_the_plan_of_a_seed_does_not_change_when_faults_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    a_machine_that_comes_again_is_a_new_node(monkeypatch)
    whole = run(replace(SHORT, steps=20))
    part = run(replace(SHORT, steps=20, faults=(0, 2)))
    assert [fault for fault in whole.faults if fault.number in (0, 2)] == list(part.faults)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_seeds() -> None:
    """As many as DISTENSOR_SIMULATION_SEEDS says, on both stores."""
    seeds = int(os.environ.get("DISTENSOR_SIMULATION_SEEDS", "300"))
    failed = []
    for seed in range(1000, 1000 + seeds):
        outcome = run(Settings(seed=seed, sqlite=seed % 5 == 0))
        if outcome.violation is not None:
            failed.append(f"{outcome.violation}\n  {outcome.command}")
    assert not failed, "\n".join(failed)
