"""How fast a device is: `python -m distensor_server.devices.benchmark DEVICE SECONDS FOLDER`, one JSON object.

A process of its own with low priority, because it loads torch. Rates are per second; of many short runs the 10th
percentile (what one may count on) and the median are told. What cannot be measured is `{"unavailable": reason}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Json: TypeAlias = dict[str, Any]
Timer: TypeAlias = Callable[[], float]

LARGEST = {"cpu": 2048}
LARGEST_ELSEWHERE = 8192
"""Three float32 matrices of that size take 0.8 GB."""
COPY_BYTES = {"cpu": 64 << 20}
COPY_BYTES_ELSEWHERE = 256 << 20
DISK_BYTES = 64 << 20
DISK_SPARE = 1 << 30
LONG_ENOUGH = 0.02
"""A run that takes less is timed too coarsely: the matrices get larger."""
FEWEST_RUNS = 5


def measure(device: str, seconds: float, folder: Path) -> Json:
    """All measures, about `seconds` for each of the three that run on the device."""
    import torch

    return {
        "torch": str(torch.__version__),
        "matmul_f32": _guarded(lambda: _matmul(torch.device(device), torch.float32, seconds)),
        "matmul_bf16": _guarded(lambda: _matmul(torch.device(device), torch.bfloat16, seconds)),
        "memory": _guarded(lambda: _copies(torch.device(device), seconds)),
        **disk_rates(folder),
    }


def _guarded(function: Callable[[], Json]) -> Json:
    try:
        return function()
    except (RuntimeError, TypeError) as error:  # out of memory, or a type that the backend lacks
        return {"unavailable": str(error).splitlines()[0][:200]}


def _matmul(device: torch.device, dtype: torch.dtype, seconds: float) -> Json:
    import torch

    size, largest = 1024, LARGEST.get(device.type, LARGEST_ELSEWHERE)
    while True:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

        def once(left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            torch.mm(left, right)
            _finish(device)

        once()
        # The best of some runs: one that was disturbed must not make the matrices stay small.
        if size >= largest or min(run_time(once) for _ in range(3)) >= LONG_ENOUGH:
            return {"size": size, **rates(once, 2.0 * size**3, seconds)}
        size *= 2


def _copies(device: torch.device, seconds: float) -> Json:
    import torch

    amount = COPY_BYTES.get(device.type, COPY_BYTES_ELSEWHERE)
    source = torch.ones(amount // 4, device=device)
    target = torch.empty_like(source)

    def once() -> None:
        target.copy_(source)
        _finish(device)

    once()
    return rates(once, 2.0 * amount, seconds)


def _finish(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def run_time(function: Callable[[], None], timer: Timer = time.perf_counter) -> float:
    began = timer()
    function()
    return timer() - began


def rates(function: Callable[[], None], amount: float, seconds: float, timer: Timer = time.perf_counter) -> Json:
    """Run for about `seconds` and tell `amount` per second: the 10th percentile and the median of all runs."""
    times: list[float] = []
    began = timer()
    while len(times) < FEWEST_RUNS or timer() - began < seconds:
        times.append(max(run_time(function, timer), 1e-9))
    slow_first = sorted(amount / taken for taken in times)
    return {
        "p10": slow_first[len(slow_first) // 10],
        "p50": slow_first[len(slow_first) // 2],
        "runs": len(slow_first),
    }


def disk_rates(folder: Path, amount: int = DISK_BYTES, timer: Timer = time.perf_counter) -> Json:
    """Bytes a second to and from the disk that holds `folder`, past the cache where the system lets us."""
    path = folder / "benchmark.tmp"
    try:
        if shutil.disk_usage(folder).free < amount + DISK_SPARE:
            raise OSError(28, "less than 1 GiB is free")
        block = os.urandom(1 << 20)
        written = run_time(lambda: _write(path, block, amount // len(block)), timer)
        read = run_time(lambda: _read(path), timer)
        return {"disk_write": amount / max(written, 1e-9), "disk_read": amount / max(read, 1e-9)}
    except OSError as error:
        missing = {"unavailable": f"{folder}: {error.strerror}"}
        return {"disk_write": missing, "disk_read": missing}
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, block: bytes, count: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def main(argv: list[str]) -> int:
    device, seconds, folder = argv
    with contextlib.suppress(OSError):
        os.nice(10)
    sys.stdout.write(json.dumps(measure(device, float(seconds), Path(folder))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
