"""What the supervisor costs a machine that does nothing else. The figures are printed; `pytest -s` shows them.

The bars are 0.3 CPU s until ready, 0.5 % CPU when idle and 60 MiB. Memory is held exactly; CPU time is not the same
on a machine that is busy with other things (a shared core runs at half speed), so its limits here are twice the bars.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
from server_processes import closing, start_command, start_hub

MIB = 1 << 20
HEAVY = {"torch", "numpy", "mlx", "pandas", "scipy", "pynvml", "keyring", "textual", "rich", "distensor.node"}


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys, distensor_server.cli, distensor_server.hublink, distensor_server.supervisor; "
        f"print(sorted(set(sys.modules) & {HEAVY!r}), 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] True"


def test_help_does_not_load_grpc() -> None:
    code = "import sys, distensor_server.cli; print(sorted(set(sys.modules) & {'grpc', 'psutil', 'distensor.comm'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def mapped_files(process: psutil.Process) -> set[str]:
    """Names of the libraries in its memory; nothing where the system does not tell (macOS)."""
    if not hasattr(process, "memory_maps"):
        return set()
    return {Path(entry.path).name for entry in process.memory_maps()}


REFERENCE = """
import argparse, asyncio, logging, sqlite3, ssl
import grpc, psutil
"""


def cpu_of_reference() -> float:
    """CPU seconds of a process that loads what the supervisor is made of, and does nothing.

    On a machine that is shared a CPU second is worth more or less from hour to hour: only ratios of one run are told
    apart. `make bench-provider` has the bars in seconds.
    """
    code = f"{REFERENCE}\nimport time; print(time.process_time())"
    argv = [sys.executable, "-c", code]
    return min(
        float(subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout) for _ in range(2)
    )


def test_the_idle_supervisor_is_light(short_dir: Path) -> None:
    reference = cpu_of_reference()
    with closing(start_hub(short_dir)) as hub:
        env = {"DISTENSOR_JOIN_TOKEN": hub.line()["node_tokens"][0]}
        with closing(start_command(short_dir, env=env)) as server:
            server.line()
            process = psutil.Process(server.pid)
            until_ready = cpu_seconds(process)
            server.line()
            connected, began = cpu_seconds(process), time.monotonic()
            time.sleep(10)
            idle = (cpu_seconds(process) - connected) / (time.monotonic() - began)  # of one core
            memory = process.memory_info().rss / MIB
            threads = process.num_threads()
            mapped = mapped_files(process)
            print(
                f"\nsupervisor: {until_ready:.2f} CPU s until ready, {connected:.2f} until connected, "
                f"{idle:.2%} CPU idle, {memory:.1f} MiB, {threads} threads; reference {reference:.2f} CPU s"
            )
            assert memory <= 60
            assert not [name for name in mapped if "torch" in name or "numpy" in name or "mlx" in name]
            assert not mapped or any("cygrpc" in name for name in mapped)
            assert until_ready <= 8 * reference
            assert idle <= 0.12 * reference
            assert server.end() == 0
