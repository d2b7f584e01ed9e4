"""A worker that follows the supervisor's protocol without torch. How it behaves is on its command line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def progress(step: int, sent: int) -> None:
    say(
        type="progress",
        state="training",
        step=step,
        total_steps=100,
        stages=[0],
        loss=2.0 / (step + 1),
        tokens_per_second=100.0,
        compute_s=0.1,
        sync_s=0.02,
        wait_s=0.03,
        links=[{"peer": -1, "sent": sent, "received": sent // 2}],
        rss=1000,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ignore-eof", action="store_true")
    parser.add_argument("--pdeathsig", action="store_true")
    parser.add_argument("--ignore-drain", action="store_true")
    parser.add_argument("--garbage", type=int, default=0)
    parser.add_argument("--long-line", type=int, default=0)
    parser.add_argument("--with-child", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--exit-when-ready", type=int)
    parser.add_argument("--signal-when-ready", type=int)
    parser.add_argument("--failed", default="")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("--tell-environment", default="")
    parser.add_argument("--csr-file", type=Path)
    parser.add_argument("--pace-file", type=Path)
    return parser.parse_args()


def before_ready(options: argparse.Namespace) -> None:
    if options.pdeathsig:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if options.with_child:
        child = subprocess.Popen(["sleep", "600"])
        say(type="event", severity="info", text=f"child {child.pid}")
    if options.tell_environment:
        told = {"environment": dict(os.environ), "argv": sys.argv}
        Path(options.tell_environment).write_text(json.dumps(told))
    for number in range(options.garbage):
        sys.stdout.write(f"garbage {number} \x1b[31m\n")
    if options.long_line:
        sys.stdout.write("x" * options.long_line + "\n")
    sys.stdout.flush()


def after_ready(options: argparse.Namespace) -> None:
    if options.failed:
        say(type="failed", code=options.failed, message="told by the fake")
    if options.traceback:
        sys.stderr.write("Traceback (most recent call last):\n  here\nValueError: a bad value\n")
    if options.signal_when_ready is not None:
        os.kill(os.getpid(), options.signal_when_ready)
    if options.exit_when_ready is not None:
        sys.stderr.flush()
        os._exit(options.exit_when_ready)


def main() -> int:
    options = parse()
    assign = json.loads(sys.stdin.readline())
    sys.stderr.write(f"rank {assign['rank']} begins\n")
    sys.stderr.flush()
    before_ready(options)
    if not options.never_ready:
        csr = options.csr_file.read_text() if options.csr_file else f"csr of rank {assign['rank']}"
        say(type="ready", v=1, port=40000 + assign["rank"], csr=csr)
    after_ready(options)
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "topology":
            say(type="connected")
            for step in range(options.steps):
                progress(step, 1000 * (step + 1))
                say(type="claim", step=step, micro_batches=2)
        elif message["type"] == "reassign":
            rank = message["rank"]
            say(type="ready", v=1, port=40000 + rank, csr=f"csr of rank {rank}", epoch=message["epoch"])
        elif message["type"] == "pace" and options.pace_file:
            with options.pace_file.open("a") as file:
                file.write(line)
        elif message["type"] == "drain" and not options.ignore_drain:
            return 0
    while options.ignore_eof or options.pdeathsig:
        time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
