"""The dashboard's cost on a pseudo terminal: start, idle, live, memory, quit. Prints a table with the bars.

    python benchmarks/dashboard.py [--seconds 10] [--json]

A bare Textual page is measured beside it, because most of the start is Textual's own.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
SIZE = (120, 40)
BARE = """
from textual.app import App
from textual.widgets import Static
class Bare(App):
    ENABLE_COMMAND_PALETTE = False
    def compose(self):
        yield Static("EARNING")
    def on_key(self, event):
        self.exit()
Bare().run()
"""


class Row(NamedTuple):
    name: str
    value: float
    unit: str
    bar: float | None


def snapshot(step: int) -> dict[str, Any]:
    """A node with one job of four ranks; the figures follow the step, so that every delta changes the screen."""
    link = {"sent": step * 1000, "received": step * 900, "sent_rate": 1e6 + step, "received_rate": 9e5 + step}
    worker = {"id": "w-1", "job": "j", "job_name": "bench", "device": "cpu", "state": "running", "step": step}
    worker |= {
        "rank": 1,
        "stages": [1],
        "compute_s": 0.4,
        "sync_s": 0.1,
        "wait_s": 0.05,
        "tokens_per_second": 4000 + step,
    }
    ranks = [{"rank": r, "node": f"node-{r}", "dp": r // 2, "pp": r % 2, "mine": r == 1} for r in range(4)]
    job = {
        "id": "j",
        "name": "bench",
        "state": "running",
        "step": step,
        "total_steps": 100_000,
        "loss": 3 + 1 / (step + 1),
    }
    job |= {"parallel": {"dp": 2, "pp": 2}, "members": ranks, "units": step, "tokens_per_second": 4000 + step}
    job |= {"links": [{"from": 1, "to": peer, **link} for peer in (0, 3, -1)]}
    device = {"id": "cpu", "name": "CPU", "usable": True, "slots": 2, "utilization": step % 10 / 10}
    return {
        "node": {
            "name": "node-1",
            "state": "EARNING",
            "state_since": time.time(),
            "started_at": time.time(),
            "why": [],
        },
        "hub": {"state": "connected", "address": "h", "rtt_ms": 3.0},
        "devices": [device],
        "workers": [worker],
        "jobs": [job],
        "earnings": {"today_micro": step * 4000, "confirmed_units": step, "confirmed_at": time.time()},
        "events": [{"at": time.time(), "severity": "info", "source": "s", "text": f"event {i}"} for i in range(20)],
    }


class Supervisor:
    """Speaks the local protocol from a thread; sends deltas once a second while `live` is set."""

    def __init__(self, path: Path) -> None:
        self.live = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    def _run(self, path: Path) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        send = lambda message: writer.write(json.dumps(message).encode() + b"\n")  # noqa: E731
        send({"type": "hello", "schema_version": 1, "server_version": "0.1.0", "node": "node-1", "pid": 1})
        send({"type": "snapshot", "seq": 1, "data": snapshot(1)})
        reading = asyncio.ensure_future(self._answer(reader, send))
        step = 1
        while not reading.done():
            await asyncio.sleep(1.0)
            if self.live.is_set():
                step += 1
                changed = {
                    name: value for name, value in snapshot(step).items() if name not in ("node", "hub", "events")
                }
                send({"type": "delta", "seq": step, "data": changed})
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, send: Any) -> None:
        while line := await reader.readline():
            send({"type": "response", "id": json.loads(line)["id"], "ok": True, "result": {}})


class Screen:
    """A process on a pty whose output is drained by a thread."""

    def __init__(self, words: list[str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", SIZE[1], SIZE[0], 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        self.seen = b""
        self.started = time.monotonic()
        self.process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environ)
        os.close(slave)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                select.select([self._master], [], [])
                self.seen += os.read(self._master, 1 << 16)
            except OSError:
                return

    def wait_for(self, text: bytes) -> float:
        """Seconds from the start until the text is on the terminal."""
        while text not in self.seen:
            assert time.monotonic() - self.started < 30, f"{text!r} never came: {self.seen[-500:]!r}"
            time.sleep(0.002)
        return time.monotonic() - self.started

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def exact_cpu(self) -> float:
        """Nanoseconds of every thread, where the ten milliseconds of `stat` are too coarse."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024

    def quit(self) -> float:
        before = time.monotonic()
        os.write(self._master, b"q")
        self.process.wait()  # with a time limit it polls every 50 ms
        took = time.monotonic() - before
        os.close(self._master)
        return took


def first_paint(words: list[str], tries: int) -> tuple[float, float]:
    """Least CPU and wall seconds until the state word is on the terminal: what others do on the machine only adds."""
    cpu, wall = [], []
    for _ in range(tries):
        screen = Screen(words)
        wall.append(screen.wait_for(b"EARNING"))
        cpu.append(screen.exact_cpu())
        screen.quit()
    return min(cpu), min(wall)


def share(screen: Screen, seconds: float) -> tuple[float, float]:
    """CPU in percent of one core, and bytes a second to the terminal."""
    cpu, written = screen.exact_cpu(), len(screen.seen)
    time.sleep(seconds)
    return 100 * (screen.exact_cpu() - cpu) / seconds, (len(screen.seen) - written) / seconds


def measure(seconds: float, tries: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.sock"
        supervisor = Supervisor(path)
        words = [sys.executable, "-m", "distensor_tui", "--socket", str(path)]
        bare, _ = first_paint([sys.executable, "-c", BARE], tries)
        cpu, wall = first_paint(words, tries)
        screen = Screen(words)
        screen.wait_for(b"EARNING")
        time.sleep(2)
        idle, _ = share(screen, seconds)
        supervisor.live.set()
        time.sleep(2)
        live, written = share(screen, seconds)
        rss = screen.rss()
        quitting = screen.quit()
    return [
        Row("bare Textual page, CPU to first paint", bare, "s", None),
        Row("CPU to first paint", cpu, "s", 0.40),
        Row("wall to first paint", wall, "s", None),
        Row("idle CPU", idle, "%", 0.3),
        Row("live CPU at 1 Hz", live, "%", 2.0),
        Row("to the terminal, live", written / 1000, "kB/s", 8.0),
        Row("RSS", rss, "MiB", 60.0),
        Row("quit", quitting, "s", 0.2),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the idle and live measurements")
    parser.add_argument("--tries", type=int, default=5, help="starts to take the least of")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = measure(options.seconds, options.tries)
    if options.json:
        print(json.dumps({"v": 1, "rows": [row._asdict() for row in rows]}))
        return 0
    print(f"{'dashboard at 120x40':<40} {'measured':>12} {'bar':>10}")
    for row in rows:
        bar = "" if row.bar is None else f"<= {row.bar:g}"
        verdict = "" if row.bar is None else "ok" if row.value <= row.bar else "OVER"
        print(f"{row.name:<40} {row.value:>7.2f} {row.unit:<4} {bar:>10}  {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
