"""What the provider's programs cost: one table, each figure with its bar.

    make bench-provider ARGS='--seconds 60'     or     python benchmarks/provider.py [--seconds 20] [--tries 5] [--json]

Every program contributes a function to MEASUREMENTS. Least of several starts, because what else the machine does only
adds; idle figures are means over --seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
from dashboard import Screen, measure, share  # type: ignore[import-not-found]  # beside this file

MIB = 1 << 20


class Row(NamedTuple):
    """One figure of one program. `bar` is the most that it may be; None where there is none."""

    program: str
    what: str
    value: float
    unit: str
    bar: float | None = None


class Options(NamedTuple):
    seconds: float
    tries: int


Measurement: TypeAlias = Callable[[Options], Iterator[Row]]


def supervisor(options: Options) -> Iterator[Row]:
    """A supervisor with a hub and nothing to do."""
    name = "distensor-server"
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as folder, _hub(Path(folder), options.tries) as tokens:
        starts = [_start(Path(folder) / str(number), token) for number, token in enumerate(tokens)]
        yield Row(name, "CPU until ready", min(start.cpu for start in starts), "s", 0.30)
        yield Row(name, "wall until ready", min(start.wall for start in starts), "s")
        with _running(Path(folder) / "0", None) as (process, _):
            time.sleep(3)
            before, began = _cpu(process.pid), time.monotonic()
            time.sleep(options.seconds)
            idle = (_cpu(process.pid) - before) / (time.monotonic() - began)
            inside = psutil.Process(process.pid)
            yield Row(name, "idle CPU", 100 * idle, "%", 0.5)
            yield Row(name, "RSS", inside.memory_info().rss / MIB, "MiB", 60.0)
            yield Row(name, "threads", inside.num_threads(), "")
            yield Row(name, "descriptors", inside.num_fds(), "")
            began = time.monotonic()
            process.terminate()
            process.wait()
            yield Row(name, "stop without work", time.monotonic() - began, "s", 2.0)


def dashboard(options: Options) -> Iterator[Row]:
    """The dashboard on a pseudo terminal of 120x40, with a supervisor that says something every second."""
    for row in measure(options.seconds, options.tries):
        yield Row("distensor", row.name, row.value, row.unit, row.bar)


OTHERS = {"btop": ["btop", "--utf-force"], "glances": ["glances", "--time", "1", "--disable-webui"], "s-tui": ["s-tui"]}
PAINTED = 2000
"""Bytes on the terminal by which any of them has drawn its first screen."""


def others(options: Options) -> Iterator[Row]:
    """Programs that people leave running beside it, as far as they are on PATH; one that is not has no row."""
    for name, words in OTHERS.items():
        if shutil.which(words[0]) is not None:
            yield from _beside(name, words, options.seconds)


def _beside(name: str, words: list[str], seconds: float) -> Iterator[Row]:
    screen = Screen(words)
    try:
        while len(screen.seen) < PAINTED:
            time.sleep(0.005)
            assert time.monotonic() - screen.started < 30, f"{name} draws nothing: {screen.seen[-300:]!r}"
        yield Row(name, "CPU to first paint", screen.exact_cpu(), "s")
        time.sleep(3)
        live, written = share(screen, seconds)
        yield Row(name, "live CPU at 1 Hz", live, "%")
        yield Row(name, "to the terminal, live", written / 1000, "kB/s")
        yield Row(name, "RSS", screen.rss(), "MiB")
    finally:
        screen.process.kill()
        screen.process.wait()


MEASUREMENTS: Sequence[Measurement] = (supervisor, dashboard, others)


class _Start(NamedTuple):
    cpu: float
    wall: float


def _start(state: Path, token: str) -> _Start:
    """Until it says that it is ready, and until it has joined, so that it can start again without a token."""
    with _running(state, token) as (process, start):
        _line(process)
        process.terminate()
        process.wait()
    return start


@contextmanager
def _hub(folder: Path, tokens: int) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "distensor", "hub", "--state", str(folder / "hub"), "--json"]
    command += ["--listen", "127.0.0.1:0", "--node-tokens", str(tokens)]
    with _ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)) as hub:
        yield _line(hub)["node_tokens"]


@contextmanager
def _running(state: Path, token: str | None) -> Iterator[tuple[subprocess.Popen[bytes], _Start]]:
    command = [sys.executable, "-m", "distensor_server", "run", "--json", "--state", str(state)]
    command += ["--socket", str(state.with_suffix(".sock"))]
    # pip compiles what it installs; a checkout is compiled by the first of several starts, unless this forbids it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"DISTENSOR_JOIN_TOKEN": token} if token else {}
    began = time.monotonic()
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    with _ended(started) as process:
        _line(process)
        yield process, _Start(cpu=_cpu(process.pid), wall=time.monotonic() - began)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{process.args!r} ended with {process.wait()}"
    value: dict[str, Any] = json.loads(line)
    return value


def _cpu(pid: int) -> float:
    """CPU seconds of all threads: nanoseconds where Linux tells them, else what psutil says."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if tasks:
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'program':<18} {'figure':<38} {'measured':>10} {'':<5}{'bar':>9}"]
    for row in rows:
        bar = "" if row.bar is None else f"<= {row.bar:g}"
        verdict = "" if row.bar is None else "ok" if row.value <= row.bar else "OVER"
        lines.append(f"{row.program:<18} {row.what:<38} {row.value:>10.2f} {row.unit:<5}{bar:>9}  {verdict}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the idle and live measurements")
    parser.add_argument("--tries", type=int, default=5, help="starts to take the least of")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = Options(seconds=arguments.seconds, tries=arguments.tries)
    rows = [row for measure in MEASUREMENTS for row in measure(options)]
    if arguments.json:
        print(json.dumps({"v": 1, "rows": [row._asdict() for row in rows]}))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
