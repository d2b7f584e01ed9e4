"""Training over home internet connections: what a step takes, where the time goes, and what travels.

Hub, aggregator, three nodes and the trainer each have a network namespace and an access line of their own, by
`distensor.testing.homenet`: hub and aggregator one of a data centre, the others 100 Mbit/s down, 10 Mbit/s up, 40 ms
from home to home, 1 % of packets lost. Bytes are those of IP packets on the lines of the nodes. Prints one Markdown
table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor.testing.homenet import DATACENTRE, HOME, Counters, HomeNet, permitted
from distensor.testing.homenet.cluster import HomeCluster

NODES = ("attic", "cellar", "shed")
AGGREGATORS = {"central": "server", "shed-own": "shed"}
"""By name, the host: one in a data centre, one on the line of a home."""
CASES: Mapping[str, Mapping[str, Any]] = {
    "dp=2, sync=allreduce": {"parallel": {"data_parallel": 2}},
    "dp=3, sync=allreduce": {"parallel": {"data_parallel": 3}},
    "dp=2, sync=distro": {"parallel": {"data_parallel": 2}, "sync": "distro"},
    "dp=2, sync=distro, aggregator": {
        "parallel": {"data_parallel": 2},
        "sync": "distro",
        "sync_options": {"topology": "aggregator", "aggregators": ["central"]},
    },
    "dp=3, sync=distro": {"parallel": {"data_parallel": 3}, "sync": "distro"},
    "dp=3, sync=distro, aggregator": {
        "parallel": {"data_parallel": 3},
        "sync": "distro",
        "sync_options": {"topology": "aggregator", "aggregators": ["central"]},
    },
    "dp=3, sync=distro, hybrid": {
        "parallel": {"data_parallel": 3},
        "sync": "distro",
        "sync_options": {"topology": "hybrid", "sites": {"central": ["attic", "cellar"], "shed-own": ["shed"]}},
    },
    "pp=2": {"parallel": {"pipeline_parallel": 2}, "micro_batches": 8},
}
ALGORITHMS = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
BARE_BYTES = 3_000_000
TAKE = """
import socket
server = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
GIVE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000))
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.monotonic() - began)
"""
LEAST_STEPS = 6
"""The first steps of a pipeline measure the links, the others use what was chosen."""
COUNTED = 5
"""Steps before this one are not counted: connections find their rate in them."""


def train(name: str, steps: int) -> dict[str, Any]:
    """In the trainer's process: train, and say what the steps took."""
    import torch

    from distensor.core import ParallelConfig
    from distensor.demo.run import DemoSettings, build_module, stage_mapping
    from distensor.nn import DistributedModel
    from distensor.training import Trainer
    from distensor.training.sessions import session

    torch.set_num_threads(1)
    settings, options = DemoSettings(steps=steps), dict(CASES[name])
    parallel = ParallelConfig(**options.pop("parallel"))
    staged = parallel.pipeline_parallel > 1
    module = build_module(settings)
    model = DistributedModel(module, stage_mapping=stage_mapping(settings) if staged else None)
    with session("hub") as opened:
        trainer = Trainer(model, parallel=parallel, lr=1e-3, progress=False, session=opened, **options)
        results = list(trainer.fit(settings.batches(), on_step=_mark).steps)
        job = trainer.job
        assert job is not None
        links = {f"{a}>{b}": count / steps for (a, b), count in job.bytes_per_link().items() if min(a, b) >= 0}
    counted = results[COUNTED - 1 :]
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "steps": len(results),
        "losses": [results[0].loss, results[-1].loss],
        "warm_up": list(results[-1].warm_up),
        "links": links,
        **{
            word: statistics.median(getattr(result, word) for result in counted)
            for word in ("seconds", "compute_seconds", "sync_seconds", "wait_seconds")
        },
    }


def _mark(result: Any) -> None:
    """Tell the other process that a step is done, so that it reads the counters of the lines."""
    print(json.dumps({"step": result.step}), flush=True)


def run(net: HomeNet, cluster: HomeCluster, name: str, steps: int) -> tuple[dict[str, Any], Mapping[str, Counters]]:
    """One case: what the trainer says, and what the lines carried meanwhile."""
    environment = {**os.environ, "DISTENSOR_TOKEN": cluster.trainer_token}
    words = [sys.executable, __file__, "--child", name, "--steps", str(steps)]
    told: dict[str, Any] = {}
    marks: list[dict[str, Counters]] = []
    with net.popen("desk", words, env=environment, stdout=subprocess.PIPE) as child:
        for line in child.stdout or ():
            told = json.loads(line)
            marks += [net.counters()] if told.get("step", 0) >= COUNTED - 1 else []
    if child.returncode:
        raise SystemExit(f"{name}: the trainer ended with {child.returncode}")
    first, last = marks[0], marks[-1]
    return told, {
        host: Counters(
            sent=last[host].sent - first[host].sent,
            received=last[host].received - first[host].received,
            lost=last[host].lost - first[host].lost,
        )
        for host in last
    }


def bare() -> None:
    """What one TCP connection carries from home to home, by the algorithms that this machine offers a namespace."""
    print("| TCP | Mbit/s of 10 up | packets lost |")
    print("|---|---|---|")
    for congestion in ALGORITHMS.read_text().split():
        with HomeNet(NODES, HOME, congestion=congestion) as net:
            source, target = NODES[:2]
            with net.popen(target, [sys.executable, "-c", TAKE], stdout=subprocess.PIPE) as taker:
                assert taker.stdout is not None
                taker.stdout.readline()
                words = [sys.executable, "-c", GIVE, net.address(target), str(BARE_BYTES)]
                with net.popen(source, words, stdout=subprocess.PIPE) as giver:
                    out, _ = giver.communicate()
            lost = sum(each.lost for each in net.counters().values())
            print(f"| {congestion} | {BARE_BYTES * 8 / 1e6 / float(out):.1f} | {lost} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--congestion", help="TCP's algorithm on all hosts (default: the system's)")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < LEAST_STEPS:
        parser.error(f"--steps {arguments.steps}: expected at least {LEAST_STEPS}")
    if arguments.child:
        print(json.dumps(train(arguments.child, arguments.steps)))
        return 0
    permission = permitted()
    print(f"emulated network: {permission.reason}")
    if not permission.granted:
        return 0
    bare()
    print()
    _table(arguments.case or list(CASES), arguments.steps, arguments.congestion)
    return 0


def _table(cases: list[str], steps: int, congestion: str | None) -> None:
    names = ["hub", "server", *NODES, "desk"]
    with (
        tempfile.TemporaryDirectory(prefix="distensor-home-") as folder,
        HomeNet(names, HOME, profiles={"hub": DATACENTRE, "server": DATACENTRE}, congestion=congestion) as net,
        HomeCluster(net, Path(folder), nodes=NODES, aggregators=AGGREGATORS) as cluster,
    ):
        print(f"TCP: {congestion or Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().strip()}")
        print(
            "| case | parameters | steps | step, s | compute, s | sync, s | wait, s | node up, kB a step "
            "| node down, kB a step | to the peer, kB a step | packets lost | forwards ahead | loss |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
        for name in cases:
            told, carried = run(net, cluster, name, steps)
            print(_row(name, told, carried), flush=True)


def _row(name: str, told: Mapping[str, Any], carried: Mapping[str, Counters]) -> str:
    counted = told["steps"] - COUNTED + 1
    up, down = (max(getattr(carried[node], way) for node in NODES) / counted for way in ("sent", "received"))
    first, last = told["losses"]
    cells = [
        name,
        f"{told['parameters']:,}",
        told["steps"],
        *(f"{told[word]:.2f}" for word in ("seconds", "compute_seconds", "sync_seconds", "wait_seconds")),
        f"{up / 1e3:,.1f}",
        f"{down / 1e3:,.1f}",
        f"{max(told['links'].values()) / 1e3:,.1f}",
        sum(each.lost for each in carried.values()),
        " ".join(map(str, told["warm_up"])) or "the schedule's own",
        f"{first:.3f} to {last:.3f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
