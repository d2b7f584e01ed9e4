"""How many units of work a second the hub's books take: claims and receipts in group commits, as the hub makes them.

    python benchmarks/hub_store.py                             a SQLite file in a temporary folder
    python benchmarks/hub_store.py --database postgresql://... a new, empty PostgreSQL database

A unit is one claim, one receipt and two entries of the ledger. What counts is the time until everything is on the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from distensor.core.control import JobState, NodeInfo, Unit, UnitKey
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank, WorkerId
from distensor.core.parallel import ParallelConfig
from distensor.hub.metering import record_claims, record_receipts
from distensor.hub.records import JobRecord, NodeRecord, RankRecord
from distensor.hub.repository import Store
from distensor.hub.stores.address import parse_database
from distensor.hub.stores.opening import open_store

JOB, EPOCH, OWNER = JobId("j_bench"), Epoch(1), "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    nodes: int
    units: int
    """In one message of a node."""
    groups: int


def fill(store: Store, nodes: int) -> None:
    with store.transaction() as books:
        for rank in range(nodes):
            info = NodeInfo(name=f"node-{rank}", host="127.0.0.1", version="0", devices=())
            books.save_node(NodeRecord(node_id=NodeId(f"n_{rank}"), secret_hash=f"h{rank}", info=info))
        ranks = tuple(
            RankRecord(rank=Rank(r), node_id=NodeId(f"n_{r}"), device_id=DeviceId("cpu"), worker_id=WorkerId(f"w{r}"))
            for r in range(nodes)
        )
        books.insert_job(
            JobRecord(
                job_id=JOB,
                owner=OWNER,
                submission="bench",
                name="bench",
                parallel=ParallelConfig(data_parallel=nodes),
                epoch=EPOCH,
                state=JobState.RUNNING,
                driver_certificate_pem="",
                ranks=ranks,
            )
        )


def batch(rank: int, first: int, count: int) -> list[Unit]:
    keys = (UnitKey(job_id=JOB, epoch=EPOCH, step=first + step, rank=Rank(rank)) for step in range(count))
    return [Unit(key=key, micro_batches=4) for key in keys]


def work(store: Store, load: Load) -> float:
    """Seconds for all groups: in each every node claims once, and the trainer's receipts are in the next one."""
    begun = perf_counter()
    for group in range(load.groups):
        batches = [batch(rank, group * load.units, load.units) for rank in range(load.nodes)]
        with store.transaction() as books:
            for rank, units in enumerate(batches):
                record_claims(books, NodeId(f"n_{rank}"), units, hour=1)
        with store.transaction() as books:
            record_receipts(books, OWNER, [unit for units in batches for unit in units], hour=1)
    return perf_counter() - begun


def report(store: Store, load: Load) -> None:
    fill(store, load.nodes)
    seconds = work(store, load)
    units = load.nodes * load.units * load.groups
    with store.reading() as books:
        credited = sum(books.earnings(NodeId(f"n_{rank}")).confirmed_units for rank in range(load.nodes))
    assert credited == units, f"{credited} of {units} units are credited"
    print(f"{load.nodes} nodes x {load.units} units, {load.groups} groups: {units / seconds:,.0f} units/s, "
          f"{2 * load.groups / seconds:,.1f} commits/s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", metavar="URL")
    parser.add_argument("--password-file", type=Path, metavar="FILE")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--units", type=int, default=10)
    parser.add_argument("--groups", type=int, default=10)
    options = parser.parse_args()
    load = Load(nodes=options.nodes, units=options.units, groups=options.groups)
    with tempfile.TemporaryDirectory() as folder:
        database = (
            parse_database(options.database, os.environ, options.password_file)
            if options.database
            else Path(folder) / "hub.sqlite"
        )
        with closing(open_store(database)) as store:
            report(store, load)


if __name__ == "__main__":
    main()
