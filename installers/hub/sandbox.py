"""A hub and eight workers on this machine, for scripts that say ds.init(mode="hub"); nothing of it stays.

make sandbox-up
make sandbox-up ARGS="--workers 4 --nodes 1"
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.commandline import UsageParser
from distensor.core.errors import DistensorError
from distensor.training.local import LocalCluster

MOST_WORKERS = 64


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {MOST_WORKERS}")
    return int(text)


def main(argv: list[str]) -> int:
    """Run until SIGINT, SIGTERM or the end of the hub; the status for the shell."""
    parser = UsageParser(prog="sandbox", description="A hub and workers as processes of this machine, until Ctrl-C.")
    parser.add_argument("--workers", type=_count, default=8, metavar="N", help="how many in all (8)")
    parser.add_argument("--nodes", type=_count, default=2, metavar="N", help="of how many supervisors (2)")
    options = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        cluster = LocalCluster(workers=options.workers, nodes=options.nodes, clock=SYSTEM_CLOCK)
    except DistensorError as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return 69
    try:
        nodes = ", ".join(f"{node.name} ({node.workers} workers)" for node in cluster.nodes)
        print(f"hub at {cluster.address}; {nodes}\nlogs in {cluster.folder}\n")
        print('A script that says ds.init(mode="hub") trains here with')
        print(f"  export DISTENSOR_TOKEN={cluster.trainer_token}\n\nCtrl-C ends it.", flush=True)
        while not stop.wait(1.0) and cluster.hub.running:
            pass
        return 0 if cluster.hub.running else 70
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
