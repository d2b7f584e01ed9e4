"""The command line of the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from distensor.core.errors import ConfigError
from distensor.testing.simulation.shrinking import shrunk
from distensor.testing.simulation.world import Outcome, Settings, run


def main(words: Sequence[str]) -> int:
    """0 when every seed kept every promise, 1 when one broke one."""
    options = _parser().parse_args(words)
    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        outcome = run(_settings(options, seed))
        print(_line(outcome))
        if options.trace:
            print(*outcome.entries, sep="\n")
        if outcome.violation is not None:
            failed += 1
            _tell(outcome, shrink=options.shrink)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m distensor.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, help="end after so many events")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--faults", help="only these faults of the seed's plan: numbers with commas, or 'none'")
    parser.add_argument("--sqlite", action="store_true", help="the real SQLite store, torn at crashes")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="do not look for a shorter failure")
    for name in ("nodes", "slots", "trainers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--faulty", type=float, default=default.faulty, help="simulated seconds with faults")
    parser.add_argument("--every", type=float, default=default.every, help="simulated seconds between two faults")
    return parser


def _settings(options: argparse.Namespace, seed: int) -> Settings:
    return Settings(
        seed=seed,
        nodes=options.nodes,
        slots=options.slots,
        trainers=options.trainers,
        faulty=options.faulty,
        every=options.every,
        steps=options.steps,
        faults=_numbers(options.faults),
        sqlite=options.sqlite,
        keep=options.trace,
    )


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None or text == "none":
        return None if text is None else ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--faults {text!r}: expected numbers with commas between them, or 'none'") from error


def _line(outcome: Outcome) -> str:
    state = "kept" if outcome.violation is None else "BROKEN"
    return (
        f"seed {outcome.settings.seed}: {state}; {outcome.steps} events, {len(outcome.faults)} faults, "
        f"{outcome.seconds:.0f} s in {outcome.real:.2f} s, trace {outcome.digest[:16]}"
    )


def _tell(outcome: Outcome, *, shrink: bool) -> None:
    print(f"  {outcome.violation}\n  again: {outcome.command} --trace")
    if not shrink or outcome.settings.steps is not None:
        return
    small = shrunk(outcome)
    print(f"  shortest: {small.violation}")
    for fault in small.faults:
        print(f"    {fault}")
    kept = replace(small.settings, faults=tuple(fault.number for fault in small.faults))
    print(f"  again: {replace(small, settings=kept).command} --trace")
