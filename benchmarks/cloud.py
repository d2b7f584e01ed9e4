"""What the HTTP API costs the hub that it runs in: CPU for each request, and how long an answer takes.

    python benchmarks/cloud.py [--requests 2000]

One client on this machine asks over one connection, one request after the other; the CPU is that of the hub's process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil

PATHS = ("/v1/health/live", "/v1/me", "/v1/nodes", "/v1/jobs", "/v1/accounts/main", "/metrics")
WARM_UP = 50


@contextmanager
def cloud() -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    """A hub with its API on free ports, and what it says when it is ready."""
    code = "import sys; from distensor.cloud.cli import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as state:
        words = ["--state", state, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--open-metrics", "--json"]
        with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            try:
                yield psutil.Process(child.pid), json.loads(child.stdout.readline())
            finally:
                child.terminate()


def measure(process: psutil.Process, ready: dict[str, Any], path: str, requests: int) -> tuple[float, float, float]:
    """CPU milliseconds a request, the median and the 99th percentile of the milliseconds until its answer."""
    host, _, port = ready["http"].removeprefix("http://").rpartition(":")
    headers = {"Authorization": f"Bearer {ready['trainer_token']}"}
    waits: list[float] = []
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        for number in range(WARM_UP + requests):
            if number == WARM_UP:
                before = sum(process.cpu_times()[:2])
            began = time.perf_counter()
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, (path, answer.status)
            waits.append((time.perf_counter() - began) * 1e3)
    cpu = (sum(process.cpu_times()[:2]) - before) * 1e3 / requests
    return cpu, statistics.median(waits[WARM_UP:]), statistics.quantiles(waits[WARM_UP:], n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the HTTP API costs.")
    parser.add_argument("--requests", type=int, default=2000, help="of each kind (2000)")
    options = parser.parse_args()
    with cloud() as (process, ready):
        print("| request | hub's CPU | answer, median | 99 of 100 |\n|---|---|---|---|")
        for path in PATHS:
            cpu, median, late = measure(process, ready, path, options.requests)
            print(f"| GET {path} | {cpu:.2f} ms | {median:.2f} ms | {late:.2f} ms |")
        print(f"\nmemory of the process: {process.memory_info().rss / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
