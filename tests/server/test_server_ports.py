"""Workers' ports: a range for workers, and a router (a fake one, over its real protocols) that forwards them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_router import FakeRouter, announcing, serving
from server_fakes import Running, events, eventually, supervisor_running

from distensor.core.errors import ConfigError
from distensor.core.reading import Reading, Unavailable
from distensor_server.config import Limits
from distensor_server.node import FeatureFactory
from distensor_server.ports.feature import LEASE_SECONDS, OpenPorts
from distensor_server.ports.router import Router, UpnpRouter, find_router
from distensor_server.supervisor import FEATURES

miniupnpc = pytest.importorskip("miniupnpc")
ON = {"worker_port_first": 52_000, "worker_ports": 3, "open_ports": True}
PORTS = [52_000, 52_001, 52_002]


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with serving(FakeRouter()) as router:
        yield router


def met(router: FakeRouter) -> UpnpRouter:
    """By its address, without a search."""
    session = miniupnpc.UPnP()
    session.selectigd(router.url)
    return UpnpRouter(session)


def reason(found: Reading[Any]) -> str:
    assert isinstance(found, Unavailable)
    return found.reason


# -- the router ------------------------------------------------------------------------------------------------------


def test_a_router_is_found_by_a_search_and_forwards_and_withdraws(router: FakeRouter) -> None:
    try:
        with announcing(router):
            found = find_router(interface="127.0.0.1", search_ms=300)
    except OSError as error:
        pytest.skip(f"no multicast on this machine's loopback: {error}")
    assert not isinstance(found, Unavailable), found
    assert found.lan_address == "127.0.0.1"
    assert found.external_address() == router.external
    assert found.forward(52_000, 3600) == 3600
    assert router.mapped == {52_000: ("127.0.0.1", 52_000, 3600)}
    assert found.withdraw(52_000) is None
    assert found.withdraw(52_000) is None  # it is gone already
    assert router.mapped == {}


def test_where_no_router_answers_the_reason_says_what_to_do() -> None:
    assert "forward the ports by hand" in reason(find_router(interface="127.0.0.1", search_ms=50))


def test_a_router_that_knows_no_end_of_a_forwarding_is_asked_for_one_without(router: FakeRouter) -> None:
    router.permanent_only = True
    assert met(router).forward(52_000, 3600) == 0
    assert router.mapped[52_000][2] == 0


def test_what_a_router_refuses_is_said(router: FakeRouter) -> None:
    router.refused = frozenset({52_000})
    assert "does not forward port 52000: ConflictInMappingEntry" in reason(met(router).forward(52_000, 60))


@pytest.mark.parametrize(
    ("external", "words"),
    [
        ("192.168.1.2", "another router is before it"),
        ("100.64.3.4", "another router is before it"),
        ("lots of words", "which is none"),
    ],
)
def test_an_address_at_which_nobody_can_reach_it_is_none(router: FakeRouter, external: str, words: str) -> None:
    router.external = external
    assert words in reason(met(router).external_address())


# -- the supervisor --------------------------------------------------------------------------------------------------


@dataclass
class Home:
    """Finds the router anew each time, as a machine at home does."""

    router: FakeRouter
    there: bool = True
    lan_address: str = ""
    found: list[Router] = field(default_factory=list)

    def find(self) -> Reading[Router]:
        if not self.there:
            return Unavailable(reason="no router answers")
        self.found.append(met(self.router))
        return self.found[-1]


def with_home(find: Callable[[], Reading[Router]]) -> list[FeatureFactory]:
    others = [feature for feature in FEATURES if feature is not OpenPorts]
    return [*others, lambda node: OpenPorts(node, find=find)]


def ports(running: Running) -> dict[str, Any]:
    section: dict[str, Any] = running.sections()["ports"]
    return section


@pytest.mark.asyncio
async def test_nothing_is_asked_without_consent(tmp_path: Path, router: FakeRouter) -> None:
    home = Home(router)
    async with supervisor_running(
        tmp_path, all_features=with_home(home.find), overrides={"worker_port_first": 52_000}
    ) as it:
        await it.connected()
        assert (ports(it)["consent"], ports(it)["first"], ports(it)["last"]) == (False, 52_000, 52_015)
    assert home.found == []
    assert router.asked == []


@pytest.mark.asyncio
async def test_ports_are_open_while_the_node_runs_and_closed_afterwards(tmp_path: Path, router: FakeRouter) -> None:
    async with supervisor_running(tmp_path, all_features=with_home(Home(router).find), overrides=ON) as running:
        await eventually(lambda: ports(running)["open"] == PORTS, "open ports")
        assert {port: seconds for port, (_, _, seconds) in router.mapped.items()} == dict.fromkeys(PORTS, LEASE_SECONDS)
        assert ports(running)["external"] == router.external
        assert router.external in running.supervisor.node.describe().hosts
        assert "the router forwards ports 52000 to 52002 of 93.184.216.34 to this machine" in events(running)
    assert router.mapped == {}


@pytest.mark.asyncio
async def test_consent_that_is_taken_back_closes_them(tmp_path: Path, router: FakeRouter) -> None:
    config = tmp_path / "config.toml"
    config.write_text("worker_port_first = 52000\nworker_ports = 3\nopen_ports = true\n")
    features = with_home(Home(router).find)
    async with supervisor_running(tmp_path, all_features=features, config_file=config) as running:
        await eventually(lambda: sorted(router.mapped) == PORTS and ports(running)["open"], "open ports")
        config.write_text("worker_port_first = 52000\nworker_ports = 2\nopen_ports = true\n")
        running.supervisor.reload()
        await eventually(lambda: sorted(router.mapped) == PORTS[:2], "one port less")
        config.write_text("worker_port_first = 52000\n")
        running.supervisor.reload()
        await eventually(lambda: router.mapped == {} and not ports(running)["open"], "closed ports")
        assert running.supervisor.node.outside == ()


@pytest.mark.asyncio
async def test_without_a_router_the_node_works_and_says_why_nothing_is_open(tmp_path: Path, router: FakeRouter) -> None:
    features = with_home(Home(router, there=False).find)
    async with supervisor_running(tmp_path, all_features=features, overrides=ON) as running:
        await running.connected()
        await eventually(lambda: ports(running)["trouble"] == ["no router answers"], "the reason")
        assert "no router answers" in events(running)


@pytest.mark.asyncio
async def test_a_search_that_fails_later_leaves_open_what_is_in_use(tmp_path: Path, router: FakeRouter) -> None:
    home, config = Home(router), tmp_path / "config.toml"
    config.write_text("worker_port_first = 52000\nworker_ports = 3\nopen_ports = true\n")
    async with supervisor_running(tmp_path, all_features=with_home(home.find), config_file=config) as running:
        await eventually(lambda: ports(running)["open"] == PORTS, "open ports")
        home.there = False
        config.write_text("worker_port_first = 52000\nworker_ports = 2\nopen_ports = true\n")
        running.supervisor.reload()
        await eventually(lambda: ports(running)["trouble"] == ["no router answers"], "the reason")
        assert ports(running)["open"] == sorted(router.mapped) == PORTS[:2], "what is wanted no longer is closed"
        assert router.external in running.supervisor.node.outside
    assert router.mapped == {}


@pytest.mark.asyncio
async def test_what_the_router_opens_while_the_node_ends_is_closed_too(tmp_path: Path, router: FakeRouter) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(UpnpRouter):
        def forward(self, port: int, seconds: int) -> Reading[int]:
            asked.set()
            assert go_on.wait(20)
            return super().forward(port, seconds)

    session = miniupnpc.UPnP()
    session.selectigd(router.url)
    async with supervisor_running(tmp_path, all_features=with_home(lambda: Slow(session)), overrides=ON):
        await eventually(asked.is_set, "the first question")
        threading.Timer(0.5, go_on.set).start()
    await eventually(lambda: router.mapped == {}, "no port left open")
    assert router.asked.count("DeletePortMapping") >= 1


# -- the range -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [{"open_ports": True}, {"worker_port_first": 65_530, "worker_ports": 16}, {"worker_port_first": -1}],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"open_ports|worker_port_first"):
        Limits(**values)


def test_a_range_ends_with_its_last_port() -> None:
    assert Limits(worker_port_first=65_520).worker_port_range == (65_520, 65_535)
    assert Limits().worker_port_range is None


def test_workers_take_the_free_ports_of_a_range_in_turn() -> None:
    from distensor.transport import Listener

    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        if first > 65_000:
            pytest.skip("no room above the port that the system chose")
        listener = Listener.bind_one("127.0.0.1", (first, first + 40))
        assert first < listener.address.port <= first + 40
        listener.close()
        with pytest.raises(ConfigError, match=f"no port from {first} to {first} is free"):
            Listener.bind_one("127.0.0.1", (first, first))
