"""A real run seen over HTTP, with hub, supervisor and workers as processes; another job waits for its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cloud_kit import Client
from test_cloud_process import client_of, cloud
from torch import nn

from distensor.core import ParallelConfig
from distensor.core.errors import PlacementError
from distensor.nn import DistributedModel
from distensor.training import Trainer
from distensor.training.sessions import session

SECONDS = 90.0


@contextmanager
def supervisor(state: Path, token: str) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "distensor_server",
        "run",
        "--state",
        str(state),
        "--socket",
        str(state / "s.sock"),
    ]
    with (state / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--name", "atlas", "--cpu-workers", "1"],
            env={**os.environ, "DISTENSOR_API_KEY": token},
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def within(what: Callable[[], Any]) -> Any:
    """The first answer that is something."""
    deadline = time.monotonic() + SECONDS
    while not (found := what()):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    return found


def trainer(name: str, *, wait: bool) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        DistributedModel(nn.Linear(4, 1)),
        parallel=ParallelConfig(),
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1]),
        lr=0.05,
        name=name,
        wait=wait,
        progress=False,
    )


def job_named(api: Client, name: str) -> dict[str, Any] | None:
    jobs = api.get("/v1/jobs?ended=true").json["items"]
    return next((job for job in jobs if job["name"] == name), None)


def test_one_run_is_watched_while_another_waits_for_its_place(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    batch = (torch.ones(8, 4), torch.zeros(8, 1))
    with (
        tempfile.TemporaryDirectory() as short,  # a Unix socket's path has little room
        cloud(tmp_path / "hub", "--http", "127.0.0.1:0", "--node-tokens", "1") as ready,
        supervisor(Path(short), ready["node_tokens"][0]),
        session("hub", token=ready["trainer_token"]),
    ):
        api = client_of(ready, ready["trainer_token"])
        within(lambda: api.get("/v1/nodes?connected=true").json["items"])
        first, second = trainer("first", wait=False), trainer("second", wait=True)
        losses = [first.step(batch).loss for _ in range(5)]
        with pytest.raises(PlacementError):
            trainer("third", wait=False).step(batch)
        results: list[float] = []
        waiting = threading.Thread(target=lambda: results.append(second.step(batch).loss))
        waiting.start()
        queued = within(lambda: job_named(api, "second"))
        assert (queued["state"], queued["position"]) == ("queued", 1)
        running = job_named(api, "first")
        assert running is not None
        path = f"/v1/runs/{running['job']}"
        within(lambda: (api.get(path).json["newest"] or {}).get("step") == 5)
        steps = api.get(f"{path}/steps").json["items"]
        assert [one["loss"] for one in steps] == losses
        assert all(one["bytes_sent"] > 0 and one["tokens_per_second"] > 0 for one in steps)
        first.close()
        waiting.join(SECONDS)
        assert results == losses[:1], "the same weights and batch"
        second.close()
        assert within(lambda: job_named(api, "second"))["state"] == "finished"
