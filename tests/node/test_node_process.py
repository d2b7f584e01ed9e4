"""The worker as a process: obeyed by a test that plays supervisor, hub and driver, some of them hostile."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from cryptography import x509
from torch import Tensor, nn
from transport_kit import JOB, Authority

from distensor.core import DRIVER_RANK
from distensor.core.errors import PeerLostError
from distensor.core.ids import Epoch, JobId, Rank, data_plane_uri
from distensor.program import Cut, capture, cut
from distensor.transport import Address, Channel, DataPlane, PeerId
from distensor.transport.driver import Command, receive_named, send_named

EPOCH = Epoch(3)
SECONDS = 60.0


class Worker:
    """A real worker process of a job with one rank."""

    def __init__(self) -> None:
        self.authority = Authority()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distensor.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def say(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self, kind: str) -> dict[str, Any]:
        """The next line of this kind."""
        while True:
            line = self.lines.get(timeout=SECONDS)
            assert line is not None, f"the worker ended before it said {kind!r}"
            if line["type"] == kind:
                return line

    def assign(self) -> dict[str, Any]:
        self.say(
            {
                "type": "assign",
                "v": 1,
                "job": JOB,
                "job_name": "test",
                "epoch": EPOCH,
                "rank": 0,
                "parallel": {"data_parallel": 1},
                "device": {"kind": "cpu", "id": "cpu"},
                "listen_host": "127.0.0.1",
                "memory_limit": 1 << 30,
                "threads": 1,
            }
        )
        return self.hear("ready")

    def send_topology(self, ready: Mapping[str, Any], job: JobId = JOB, epoch: int = EPOCH) -> None:
        request = x509.load_pem_x509_csr(ready["csr"].encode())
        certificate = {
            "rank": 0,
            "certificate_pem": self.authority.sign(request.public_key(), [data_plane_uri(job, EPOCH, Rank(0))]),
            "authority_pem": self.authority.pem,
        }
        member = {"rank": 0, "node": "here", "host": "127.0.0.1", "port": ready["port"]}
        order = {"type": "topology", "job": JOB, "epoch": epoch, "members": [member], "certificate": certificate}
        self.say(order)

    def dial(self, ready: Mapping[str, Any]) -> DataPlane:
        """The driver's plane."""
        credentials = self.authority.credentials([data_plane_uri(JOB, EPOCH, DRIVER_RANK)])
        me = PeerId(job_id=JOB, epoch=EPOCH, rank=DRIVER_RANK)
        return DataPlane.open(me, credentials, None, {0: Address(host="127.0.0.1", port=ready["port"])})

    def end(self) -> int:
        """Close its input, as a supervisor that is done does; the exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.process.kill()
    worker.end()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def pieces_of_model() -> Cut:
    return cut(capture(Model(), torch.ones(4, 3), loss_weight="rows"))


PLAN: dict[str, Any] = {
    "schedule": "1f1b",
    "stages": 1,
    "optimizer": {"name": "sgd", "lr": 0.1, "options": {}},
    "clip_norm": None,
    "norm_type": "2",
    "sharded": [],
    "recompute": "none",
    "sync": "allreduce",
    "seed": 0,
    "tied": [],
}


class Driver:
    """Sends commands in order and returns the replies' meta data."""

    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane
        self.sequence = 0

    def ask(self, command: str, meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        send_named(self.plane, 0, Channel.CONTROL, self.sequence, {"command": command, **meta}, tensors or {})
        answer, _ = receive_named(self.plane, 0, Channel.REPLY, self.sequence, SECONDS)
        self.sequence += 1
        return answer

    def load(self, pieces: Cut, **changes: Any) -> dict[str, Any]:
        text = torch.frombuffer(bytearray(pieces.programs[0].to_json()), dtype=torch.uint8)
        weights = {f"weight/0/{name}": tensor for name, tensor in pieces.weights(0).items()}
        return self.ask(Command.LOAD, PLAN, {"program/0": text, **weights, **changes})


@pytest.fixture
def driver(worker: Worker) -> Iterator[Driver]:
    ready = worker.assign()
    worker.send_topology(ready)
    with worker.dial(ready) as plane:
        worker.hear("connected")
        yield Driver(plane)


def test_a_whole_life(worker: Worker, driver: Driver) -> None:
    pieces = pieces_of_model()
    assert driver.load(pieces)["code"] == "ok"
    batch = {"micro_batches": 1, "step": 1, "lr": 0.1, "total_steps": 1}
    answer = driver.ask(Command.STEP, batch, {"0/input": torch.ones(4, 3)})
    assert answer["committed"]
    assert answer["weight"] == 4
    assert worker.hear("claim") == {
        "type": "claim", "step": 1, "micro_batches": 1, "epoch": EPOCH, "rank": 0,
    }  # fmt: skip
    while (progress := worker.hear("progress"))["state"] != "training":
        continue
    assert (progress["step"], progress["total_steps"], progress["loss"]) == (1, 1, answer["loss"])
    assert progress["links"][0]["peer"] == -1
    assert driver.ask(Command.END, {})["code"] == "ok"
    assert worker.process.wait(SECONDS) == 0


def test_hostile_commands_are_refused_and_the_worker_goes_on(worker: Worker, driver: Driver) -> None:
    pieces = pieces_of_model()
    garbage = torch.frombuffer(bytearray(b'{"version": 1}'), dtype=torch.uint8)
    foreign = {"program/7": garbage}
    refused = [
        driver.load(pieces, **{"program/0": garbage}),
        driver.load(pieces, **{"weight/0/layer.weight": torch.zeros(9, 9)}),
        driver.load(pieces, **{"weight/0/layer.weight": torch.zeros(1, 3, dtype=torch.float64)}),
        driver.load(pieces, **foreign),
        driver.load(pieces, elsewhere=garbage),
        driver.ask(Command.LOAD, {**PLAN, "optimizer": {"name": "os.system", "lr": 0.1, "options": {}}}),
        driver.ask(Command.LOAD, {**PLAN, "schedule": "never"}),
        driver.ask(Command.LOAD, {}),
    ]
    assert [answer["code"] for answer in refused] == ["refused_program"] * len(refused)
    assert all(answer["message"] for answer in refused)
    assert driver.load(pieces)["code"] == "ok"
    wrong_batches = [
        driver.ask(Command.STEP, {"micro_batches": 1, "step": 1, "lr": 0.1}, {"0/input": torch.ones(4, 5)}),
        driver.ask(Command.STEP, {"micro_batches": 1, "step": 1, "lr": 0.1}, {"0/other": torch.ones(4, 3)}),
        driver.ask(Command.STEP, {"micro_batches": 1, "step": 1, "lr": 0.1}, {"3/input": torch.ones(4, 3)}),
        driver.ask(Command.STEP, {"micro_batches": -1, "step": 1, "lr": 0.1}),
        driver.ask(Command.REPLACE, {}, {"0/layer.weight": torch.zeros(2, 2)}),
    ]
    assert [answer["code"] for answer in wrong_batches] == ["refused_program"] * len(wrong_batches)
    batch = {"micro_batches": 1, "step": 1, "lr": 0.1}
    assert driver.ask(Command.STEP, batch, {"0/input": torch.ones(4, 3)})["committed"]


def test_a_command_before_load_is_refused(worker: Worker, driver: Driver) -> None:
    answer = driver.ask(Command.STEP, {"micro_batches": 0, "step": 1, "lr": 0.1})
    assert answer["code"] == "refused_program"
    assert "load" in answer["message"]


def test_drain_ends_the_worker_after_the_command_in_hand(worker: Worker, driver: Driver) -> None:
    assert driver.load(pieces_of_model())["code"] == "ok"
    worker.say({"type": "drain", "seconds": 5})
    assert worker.process.wait(SECONDS) == 0
    with pytest.raises(PeerLostError):
        driver.ask(Command.STATE, {})


def test_a_driver_that_leaves_does_not_end_a_healthy_worker(worker: Worker, driver: Driver) -> None:
    driver.plane.close()
    assert f"epoch {EPOCH} is over" in worker.hear("event")["text"]
    assert worker.process.poll() is None
    worker.say({"type": "drain", "seconds": 1})
    assert worker.process.wait(SECONDS) == 0


def test_the_end_of_input_is_the_end(worker: Worker) -> None:
    worker.assign()
    assert worker.end() == 0


def test_a_wrong_assignment_has_its_exit_status(worker: Worker) -> None:
    worker.say({"type": "assign", "job": 3})
    assert "should be of type" in worker.hear("failed")["message"]
    assert worker.process.wait(SECONDS) == 64


def test_a_device_that_is_not_there_is_no_silent_cpu(worker: Worker) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    message = {
        "type": "assign", "v": 1, "job": JOB, "job_name": "t", "epoch": EPOCH, "rank": 0,
        "parallel": {}, "device": {"kind": "cuda", "id": "GPU-1"}, "listen_host": "127.0.0.1",
        "memory_limit": None, "threads": 1,
    }  # fmt: skip
    worker.say(message)
    ready = worker.hear("ready")
    worker.send_topology(ready)
    with worker.dial(ready):
        assert "GPU-1" in worker.hear("failed")["message"]
        assert worker.process.wait(SECONDS) == 70
