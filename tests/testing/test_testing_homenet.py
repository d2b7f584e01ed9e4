"""The emulated internet for real, where this machine permits it; a skip says why it does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import ConfigError
from distensor.testing.homenet import HomeNet, Profile, permitted
from distensor.testing.homenet.profiles import MEGABIT

LINE = Profile(name="test", down=100 * MEGABIT, up=10 * MEGABIT, rtt=0.04)

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 9000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("up", flush=True)
connection, _ = server.accept()
count = 0
while data := connection.recv(1 << 16):
    count += len(data)
connection.sendall(str(count).encode())
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000), float(sys.argv[3]))
began = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
print(connection.recv(99).decode(), time.monotonic() - began)
"""
OWNER = """
import sys
from distensor.testing.homenet import HomeNet
with HomeNet(["a"]) as net:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    child = net.popen("a", [sys.executable, "-c", code])
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def net() -> Iterator[HomeNet]:
    permission = permitted()
    if not permission.granted:
        pytest.skip(f"no emulated network here: {permission.reason}")
    with HomeNet(["a", "b", "home"], LINE, closed=["home"]) as made:
        yield made


def send(net: HomeNet, source: str, target: str, address: str, size: int, patience: float = 10.0) -> tuple[int, float]:
    """What arrived, and the seconds from connected to acknowledged."""
    python = [sys.executable, "-S", "-c"]
    with net.popen(target, [*python, SERVE, address], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        with net.popen(
            source,
            [*python, SEND, address, str(size), str(patience)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as client:
            out, _ = client.communicate(timeout=30)
        server.kill()
    if not out:
        raise ConnectionError(f"{source} did not reach {target}")
    count, seconds = out.split()
    return int(count), float(seconds)


@pytest.mark.parametrize("family", [4, 6])
def test_bytes_between_hosts_take_the_time_of_the_line(net: HomeNet, family: int) -> None:
    before = net.counters()
    address = net.address("b") if family == 4 else net.address6("b")
    count, seconds = send(net, "a", "b", address, 150_000)
    assert count == 150_000
    assert seconds >= 150_000 / LINE.up + LINE.rtt / 2
    after = net.counters()
    carried = after["a"].sent - before["a"].sent
    assert 150_000 < carried < 200_000
    assert after["b"].received - before["b"].received >= 150_000


def test_nobody_reaches_a_closed_host_which_itself_reaches_others(net: HomeNet) -> None:
    assert send(net, "home", "a", net.address("a"), 10)[0] == 10
    with pytest.raises(ConnectionError):
        send(net, "a", "home", net.address("home"), 10, patience=0.3)


def test_a_cut_way_is_silent_until_it_is_mended(net: HomeNet) -> None:
    net.cut("a", "b")
    with pytest.raises(ConnectionError):
        send(net, "a", "b", net.address("b"), 10, patience=0.3)
    net.mend("a", "b")
    assert send(net, "a", "b", net.address("b"), 10)[0] == 10


def test_hosts_need_different_names() -> None:
    with pytest.raises(ConfigError, match="different names"):
        HomeNet(["a", "a"])


def test_a_killed_owner_leaves_nothing(net: HomeNet) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        inside = str(Path(f"/proc/{pid}/ns/net").readlink())
        owner.kill()
    deadline = SYSTEM_CLOCK.monotonic() + 20
    while left := [who for who in _networks() if who[1] == inside]:
        assert SYSTEM_CLOCK.monotonic() < deadline, left
        SYSTEM_CLOCK.sleep(0.02)


def _networks() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            yield entry.parts[2], str(entry.readlink())
        except OSError:
            continue  # it ended, or is another user's
