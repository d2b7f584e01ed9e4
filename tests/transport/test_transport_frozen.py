"""A peer in another process that is stopped, computes for long, or dies: real signals, default patience."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from transport_kit import JOB, Authority, peer

from distensor.core.errors import PeerLostError, TransportTimeoutError
from distensor.transport import Address, Channel, DataPlane, Listener, Tag, Timeouts

SLACK = 1.0
"""Seconds by which a busy machine may hold our own thread up."""


@dataclass
class Pair:
    """Rank 1 here, rank 0 in a child (`plane_child.py`)."""

    authority: Authority = field(default_factory=Authority)
    listener: Listener = field(default_factory=lambda: Listener.bind("127.0.0.1"))
    planes: list[DataPlane] = field(default_factory=list)
    child: subprocess.Popen[str] | None = None

    def start(self, work: str) -> DataPlane:
        script = Path(__file__).with_name("plane_child.py")
        self.child = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        papers = self.authority.place(0)
        self._say(
            job=JOB, epoch=1, key=papers.key_pem.decode(), certificate=papers.certificate_pem,
            authority=papers.authority_pem, port=self.listener.address.port, work=work,
        )  # fmt: skip
        plane = self.open(epoch=1)
        assert self.hear("open") == ""
        return plane

    def open(self, *, epoch: int, connect: float = 30.0) -> DataPlane:
        peers = {0: Address(host="127.0.0.1", port=1)}
        papers = self.authority.place(1, epoch=epoch)
        timeouts = replace(Timeouts(), connect=connect)
        self.planes.append(
            DataPlane.open(peer(1, epoch=epoch), papers, self.listener, peers, timeouts=timeouts, driver=False)
        )
        return self.planes[-1]

    def _say(self, **order: Any) -> None:
        assert self.child is not None
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()

    def hear(self, event: str) -> str:
        assert self.child is not None
        assert self.child.stdout is not None
        told = json.loads(self.child.stdout.readline())
        assert told["event"] == event, told
        return str(told["reason"])

    def signal(self, number: signal.Signals) -> float:
        assert self.child is not None
        self.child.send_signal(number)
        return time.monotonic()

    def close(self) -> None:
        for plane in self.planes:
            plane.close()
        self.listener.close()
        if self.child is not None:
            self.child.kill()
            self.child.wait(20)
            for pipe in (self.child.stdin, self.child.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def drain(plane: DataPlane) -> tuple[float, str]:
    """Take what comes until the peer is lost: when that was, and why."""
    while True:
        try:
            plane.recv(0, Tag(Channel.GRADIENT), 30)
        except PeerLostError as error:
            return time.monotonic(), error.reason


def test_a_stopped_peer_is_lost_within_three_seconds_and_cannot_come_back(pair: Pair) -> None:
    """It stops in the middle of a message, is given up, and goes on when the membership has a newer epoch."""
    plane = pair.start("send")
    assert plane.recv(0, Tag(Channel.GRADIENT), 10).body
    stopped = pair.signal(signal.SIGSTOP)
    lost, reason = drain(plane)
    print(f"a stopped peer was lost after {lost - stopped:.2f} s")
    assert lost - stopped < Timeouts().silent + SLACK
    assert reason == "not a byte came from it for 2.5 s"
    plane.close()

    refused: list[TransportTimeoutError] = []

    def wait_for_it() -> None:
        with pytest.raises(TransportTimeoutError) as late:
            pair.open(epoch=2, connect=6.0)
        refused.append(late.value)

    opening = threading.Thread(target=wait_for_it)
    opening.start()
    pair.signal(signal.SIGCONT)
    assert pair.hear("lost")
    assert f"the peer is distensor://{JOB}/2/1; expected a place of job {JOB} in epoch 1" in pair.hear("back")
    assert pair.child is not None
    assert pair.child.wait(20) == 0, "it ends by itself"
    opening.join(30)
    assert "rank 0 (did not dial)" in str(refused[0]), "nobody got into the newer epoch"


def test_a_killed_peer_is_lost_at_once(pair: Pair) -> None:
    plane = pair.start("send")
    assert plane.recv(0, Tag(Channel.GRADIENT), 10).body
    killed = pair.signal(signal.SIGKILL)
    lost, _ = drain(plane)
    print(f"a killed peer was lost after {(lost - killed) * 1e3:.1f} ms")
    assert lost - killed < 0.1 + SLACK


@pytest.mark.slow
def test_a_peer_that_computes_for_long_is_not_lost(pair: Pair) -> None:
    """One call of torch that takes several times as long as a peer may be silent: it lets other threads speak."""
    plane = pair.start("compute")
    began = time.monotonic()
    assert plane.recv(0, Tag(Channel.GRADIENT), 110).header == b"done"
    took = time.monotonic() - began
    print(f"the peer computed for {took:.1f} s and was heard all the time")
    assert took > 2 * Timeouts().silent
    assert not plane.lost()
