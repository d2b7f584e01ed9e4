"""The dashboard and the command line on a node that really works: what is on the screen is what happens."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import e2e_models as models
import pytest
from local_socket import wait_until

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Session, Trainer

Python = Callable[..., Any]


def earning(seen: dict[str, Any]) -> bool:
    (job,) = [job for job in seen["jobs"] if job["name"] == "busy-job"] or [{"step": None}]
    return seen["earnings"]["confirmed_units"] > 0 and bool(job["step"])


@pytest.fixture(scope="module")
def busy(mesh: Session) -> Iterator[Path]:
    """The socket of a node whose job goes on training until the tests are done."""
    assert mesh.cluster is not None
    model = DistributedModel(models.MLP(), stage_mapping=StageMapping(models.MLP_TWO))
    trainer = Trainer(
        model,
        parallel=ParallelConfig(data_parallel=2, pipeline_parallel=2),
        loss=models.classify,
        name="busy-job",
        progress=False,
        session=mesh,
    )
    (batch,) = models.points(1)
    trainer.step(batch)
    node = trainer.job.topology.members[0].node_name  # type: ignore[union-attr]
    socket = next(node_.socket for node_ in mesh.cluster.nodes if node_.name == node)
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.05):
            trainer.step(batch)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(socket, earning)
        yield socket
    finally:
        over.set()
        thread.join()
        trainer.close()


def test_status_as_json(python: Python, busy: Path) -> None:
    done = python("-m", "distensor_tui", "status", "--json", "--socket", str(busy))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["v"] == 1
    text = done.stdout
    assert "busy-job" in text
    assert '"EARNING"' in text


@pytest.mark.parametrize("size", ["120x40", "80x24"])
def test_the_screen_shows_the_job_its_grid_and_what_it_earned(
    python: Python, busy: Path, tmp_path: Path, size: str
) -> None:
    picture = tmp_path / "home.svg"
    done = python(
        "-m", "distensor_tui", "--socket", str(busy), "--screenshot", str(picture), "--size", size, "--wait", "2"
    )
    assert done.returncode == 0, done.stderr
    screen = html.unescape(re.sub(r"<[^>]+>", "", picture.read_text())).replace("\N{NO-BREAK SPACE}", " ")
    for expected in ("EARNING", "busy-job", "DP 2 x TP 1 x PP 2 x CP 1", "dp0", "dp1"):
        assert expected in screen, expected
    assert re.search(r"\[(atlas|bolt):\d\]", screen), "this node's ranks are marked"
    earned = re.search(r"today\s+(\d+\.\d+)", screen)
    assert earned is not None
    assert float(earned[1]) > 0
    assert re.search(r"loss\s+\d\.\d+", screen)


def settled(seen: dict[str, Any]) -> bool:
    """The account was compared with the hub, and the round trips to the other node are measured."""
    income = seen["income"]
    links = [link for job in seen["jobs"] for link in job["links"] if link["to"] >= 0]
    compared = income is not None and income["ledger"]["matched"]["units"] > 0
    return compared and any(link["rtt_ms"] is not None for link in links)


def test_the_account_of_a_working_node_is_the_hubs_ledger(python: Python, busy: Path) -> None:
    seen = wait_until(busy, settled, 60)
    income, ledger = seen["income"], seen["income"]["ledger"]
    assert ledger["state"] == "equal", ledger
    assert [ledger[word]["units"] for word in ("refused", "missing_here", "missing_there")] == [0, 0, 0]
    assert income["total"]["micro"] == sum(job["micro"] for job in income["jobs"])
    assert income["total"]["micro"] == sum(device["micro"] for device in income["devices"])
    assert all(0 < link["rtt_ms"] < 5000 for job in seen["jobs"] for link in job["links"] if link["rtt_ms"] is not None)
    done = python("-m", "distensor_tui", "earnings", "--by", "job", "--json", "--socket", str(busy))
    assert done.returncode == 0, done.stderr
    statement = json.loads(done.stdout)["result"]
    assert sum(row["micro"] for row in statement["rows"]) == statement["total"]["micro"] > 0
    done = python("-m", "distensor_tui", "earnings", "--units", "-n", "3", "--json", "--socket", str(busy))
    assert {unit["job_name"] for unit in json.loads(done.stdout)["result"]["units"]} == {"busy-job"}
