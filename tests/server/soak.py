"""A soak of the supervisor: workers restarted all the time, the hub now and then, dashboards that come and go.

    nice python tests/server/soak.py --seconds 3600 [--json FILE]

prints what grew. `make soak` runs it as a test, for an hour or for DISTENSOR_SOAK_SECONDS.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import psutil
from server_fakes import FAKE_WORKER, Client
from server_processes import Child, closing, start_hub

HERE = Path(__file__).parent
MIB = 1 << 20
SAMPLE_SECONDS = 5.0
HUB_RESTART_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    at: float
    rss_mib: float
    descriptors: int
    threads: int
    zombies: int
    log_bytes: int
    log_files: int
    cpu_s: float
    jobs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The medians of the first and the last quarter, and the slope of all (Theil-Sen: the median of all slopes)."""

    what: str
    first: float
    last: float
    slope_per_hour: float

    @property
    def grown(self) -> float:
        return self.last - self.first


def growth(what: str, times: Sequence[float], values: Sequence[float]) -> Growth:
    quarter = max(1, len(values) // 4)
    chosen = range(0, len(values), max(1, len(values) // 100))
    slopes = [(values[b] - values[a]) / (times[b] - times[a]) for a, b in combinations(chosen, 2)]
    return Growth(
        what=what,
        first=statistics.median(values[:quarter]),
        last=statistics.median(values[-quarter:]),
        slope_per_hour=statistics.median(slopes) * 3600 if slopes else 0.0,
    )


def judge(samples: Sequence[Sample]) -> list[Growth]:
    """Without the first tenth: caches fill, and the first jobs make the files that the later ones reuse."""
    kept = samples[len(samples) // 10 :]
    times = [sample.at for sample in kept]
    return [
        growth(name, times, [float(getattr(sample, name)) for sample in kept])
        for name in ("rss_mib", "descriptors", "threads", "zombies", "log_bytes", "log_files")
    ]


def soak(directory: Path, seconds: float, *, pause: float = 1.0, every: float = SAMPLE_SECONDS) -> list[Sample]:
    """Run a supervisor for `seconds` and sample it."""
    with closing(start_hub(directory)) as first_hub:
        told = first_hub.line()
        port = _free_port()
        options = {"directory": str(directory), "pause": pause, "worker": FAKE_WORKER, "metrics_port": port}
        env = {"DISTENSOR_JOIN_TOKEN": told["node_tokens"][0]}
        command = [sys.executable, str(HERE / "soak_main.py"), json.dumps(options)]
        started = Child(command, directory / "server.err", env)
        with closing(started) as server, _hubs(directory, first_hub, told) as restart:
            assert server.line()["event"] == "ready"
            samples = list(_samples(server, directory, seconds, every, restart, port))
            assert server.end() == 0, server.log
    return samples


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _hubs(directory: Path, first: Child, told: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Gives a function that kills the hub and starts it again at the same port."""
    port = int(told["address"].rsplit(":", 1)[1])
    present = [first]

    def restart() -> None:
        present[0].kill()
        present[0].close()
        present[0] = start_hub(directory, tokens=0, port=port)
        present[0].line()

    try:
        yield restart
    finally:
        present[0].close()


def _samples(
    server: Child, directory: Path, seconds: float, every: float, restart_hub: Callable[[], None], port: int
) -> Iterator[Sample]:
    process, began, restarts = psutil.Process(server.pid), time.monotonic(), 0
    while time.monotonic() - began < seconds:
        time.sleep(every)
        yield _sample(process, directory, time.monotonic() - began)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            assert b"distensor_state" in page.read()
        if time.monotonic() - began > HUB_RESTART_SECONDS * (restarts + 1):
            restarts += 1
            restart_hub()


def _sample(process: psutil.Process, directory: Path, at: float) -> Sample:
    """Looks as a dashboard does: connects, reads a snapshot, goes."""
    client = Client(directory / "s.sock")
    data = client.request("snapshot")["result"]["data"]
    client.close()
    newest = max((int(job["id"].split("_")[1]) for job in data["jobs"]), default=0)
    files = [path for path in (directory / "state").rglob("*.log*") if path.is_file()]
    times = process.cpu_times()
    return Sample(
        at=round(at, 1),
        rss_mib=process.memory_info().rss / MIB,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        zombies=sum(child.status() == psutil.STATUS_ZOMBIE for child in _children(process)),
        log_bytes=sum(_size(path) for path in files),
        log_files=len(files),
        cpu_s=times.user + times.system,
        jobs=newest,
    )


def _children(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if child.is_running()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # rotated or pruned in this moment
        return 0


def report(samples: Sequence[Sample]) -> str:
    last = samples[-1]
    head = f"{last.at:.0f} s, {last.jobs} jobs of two workers, supervisor {last.cpu_s / last.at:.2%} CPU"
    rows = [f"{'':<14}{'first quarter':>14}{'last quarter':>14}{'per hour':>10}"]
    rows += [f"{g.what:<14}{g.first:>14.2f}{g.last:>14.2f}{g.slope_per_hour:>10.2f}" for g in judge(samples)]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as directory:
        samples = soak(Path(directory), arguments.seconds)
    print(report(samples))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(sample) for sample in samples]))


if __name__ == "__main__":
    main()
