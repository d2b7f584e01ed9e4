"""`distensor demo`: two nodes with two workers each, a small language model, the dashboard, a report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from distensor.core.commandline import UsageParser
from distensor.core.errors import DistensorError

if TYPE_CHECKING:
    from torch import nn

    from distensor.demo.report import Report
    from distensor.demo.run import DemoSettings, MeshRun
    from distensor.training.results import StepResult
    from distensor.training.sessions import Session

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 69


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        report = _run(arguments)
    except DistensorError as error:
        print(f"distensor demo: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        print("\ndistensor demo: stopped by you; nothing is left running", file=sys.stderr)
        return 130
    for line in report.lines():
        print(line, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(report.to_json()))
    return 0 if report.passed else EXIT_FAILED


def _steps(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 2 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"--steps {text}: expected a whole number from 2 to 100000")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="distensor demo",
        description="Train a small language model on this machine, through a real hub, two real supervisors and four "
        "real workers (data parallel 2 x pipeline parallel 2), and compare with the same training in one process.",
    )
    parser.add_argument("--no-ui", action="store_true", help="progress bars instead of the dashboard")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line; implies --no-ui")
    parser.add_argument("--steps", type=_steps, default=60, metavar="N", help="optimizer steps (default 60)")
    parser.add_argument(
        "--chaos",
        action="store_true",
        help="kill a worker in the middle of a step, a third into the run; training goes on, and it comes back",
    )
    parser.add_argument(
        "--screenshot", type=Path, metavar="FILE.svg", help="keep a picture of the dashboard taken during the run"
    )
    return parser


def _run(arguments: argparse.Namespace) -> Report:
    _say("starting a hub and two nodes ...")
    from distensor.demo.run import DemoSettings, compare, run_in_one_process, two_modules
    from distensor.training.sessions import session

    settings = dataclasses.replace(DemoSettings(), steps=arguments.steps)
    module, reference = two_modules(settings)
    if arguments.chaos:
        _plan_chaos(settings)
    with session("local", workers=settings.workers, nodes=len(settings.nodes), node_names=settings.nodes) as opened:
        mesh = _train(opened, module, settings, arguments)
    _say("the same training in one process, for comparison ...")
    with _Bar("one process", settings.steps) as bar:
        losses, seconds = run_in_one_process(reference, settings, bar.update)
    return compare(mesh, reference, losses, seconds, settings)


def _plan_chaos(settings: DemoSettings) -> None:
    """Workers read it from the environment of the session that starts them."""
    from distensor.node.faults import environment_of, fail_at

    step = max(2, settings.steps // 3)
    rank = settings.parallel.world_size - 1
    os.environ.update(environment_of(fail_at(rank, step, "backward")))
    _say(f"chaos: the worker of rank {rank} will be killed (SIGKILL) in step {step} ...")


def _train(opened: Session, module: nn.Module, settings: DemoSettings, arguments: argparse.Namespace) -> MeshRun:
    from distensor.demo.run import run_on_mesh

    assert opened.cluster is not None
    socket = opened.cluster.nodes[0].socket
    shows = _wants_dashboard(arguments)
    with _Dashboard(socket, shown=shows) as dashboard, _Picture(socket, arguments.screenshot) as picture:

        def on_step(result: StepResult) -> None:
            picture.on_step(result, settings.steps)
            dashboard.on_step(result, settings.steps)

        return run_on_mesh(opened, module, settings, progress=not shows and not arguments.json, on_step=on_step)


def _wants_dashboard(arguments: argparse.Namespace) -> bool:
    if arguments.no_ui or arguments.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return False
    size = shutil.get_terminal_size()
    fits = size.columns >= 60 and size.lines >= 15 and os.environ.get("TERM", "dumb") != "dumb"
    if fits and find_spec("distensor_tui") is None:
        _say("the dashboard is not installed (pip install distensor-tui); going on without it")
        return False
    return fits


class _Dashboard:
    """The real dashboard on our terminal, looking at the first node. Training goes on when its user quits it."""

    def __init__(self, socket: Path, *, shown: bool) -> None:
        self._command = [sys.executable, "-m", "distensor_tui", "--socket", str(socket)]
        self._shown = shown
        self._process: subprocess.Popen[bytes] | None = None
        self._bar: _Bar | None = None

    def __enter__(self) -> _Dashboard:
        if self._shown:
            self._process = subprocess.Popen(self._command)
        return self

    def on_step(self, result: StepResult, total: int) -> None:
        if self._process is None or self._process.poll() is None:
            return
        if self._bar is None:
            self._bar = _Bar("training", total)
        self._bar.update(result.step, result.loss)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()


class _Picture:
    """A picture of the dashboard, made by the dashboard itself, which watches until most steps are done."""

    def __init__(self, socket: Path, target: Path | None) -> None:
        self._socket = socket
        self._target = target
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Picture:
        return self

    def on_step(self, result: StepResult, total: int) -> None:
        if self._target is None or self._process is not None or result.step < min(3, total):
            return
        seconds = max(1.0, 0.7 * (total - result.step) * result.seconds)
        command = [sys.executable, "-m", "distensor_tui", "--socket", str(self._socket)]
        command += ["--screenshot", str(self._target), "--size", "120x40", "--wait", f"{seconds:.1f}"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            self._process.wait()


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self, name: str, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=name, unit="step", disable=not sys.stderr.isatty())

    def update(self, step: int, loss: float) -> None:
        self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
