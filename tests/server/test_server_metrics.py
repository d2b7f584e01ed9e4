"""The Prometheus page: what it says, that a strict reader takes it, and who may read it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from exposition_parser import UNITS, parse
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import Running, events, eventually, start_job, supervisor_running

from distensor_server.metrics import FAMILIES, exposition
from distensor_server.metricspage import LARGEST_REQUEST, answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def ask(port: int, request: str) -> tuple[int, dict[str, str], str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    whole = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    head, _, body = whole.partition("\r\n\r\n")
    first, *fields = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in fields), body


def get(port: int, host: str = "", path: str = "/metrics", method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host or f'127.0.0.1:{port}'}\r\nUser-Agent: x\r\n\r\n"


@pytest.mark.asyncio
async def test_a_running_node_can_be_scraped(short_dir: Path) -> None:
    port = free_port()
    async with supervisor_running(short_dir, overrides={"cpu_workers": 2, "metrics_port": port}) as running:
        await start_job(running, 0, 1)
        await eventually(lambda: running.sections()["metrics"]["address"], "it listens")
        assert running.sections()["metrics"]["address"] == f"http://127.0.0.1:{port}/metrics"
        status, headers, body = await ask(port, get(port))
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        metrics = parse(body)
        assert metrics["distensor_state"].samples[(("state", "EARNING"),)] == 1
        assert sum(metrics["distensor_state"].samples.values()) == 1
        assert metrics["distensor_hub_connected"].samples[()] == 1
        assert metrics["distensor_hub_rtt_seconds"].samples[()] == 0.0015
        assert metrics["distensor_workers"].samples[(("state", "running"),)] == 2
        sent = metrics["distensor_link_sent_bytes_total"].samples
        assert sent[(("job", "j_1"), ("epoch", "1"), ("rank", "0"), ("peer", "-1"))] == 3000
        (memory,) = {value for labels, value in metrics["distensor_device_memory_bytes"].samples.items()}
        assert memory == running.sections()["devices"][-1]["memory_total"]
        status, headers, body = await ask(port, get(port, method="HEAD"))
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 1000


@pytest.mark.asyncio
async def test_without_the_setting_nothing_listens_and_it_follows_a_reload(short_dir: Path) -> None:
    first, second = free_port(), free_port()
    config = short_dir / "server.toml"
    config.write_text("")

    def reload(running: Running, text: str) -> None:
        config.write_text(text)
        running.supervisor.reload()

    async with supervisor_running(short_dir, config_file=config, overrides=None) as running:
        assert running.sections()["metrics"] == {"enabled": False, "address": None, "error": None}
        for port in (first, second):
            reload(running, f"metrics_port = {port}\n")
            await eventually(lambda port=port: f":{port}/" in str(running.sections()["metrics"]["address"]), "listens")
            assert (await ask(port, get(port)))[0] == 200
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await ask(first, get(first))
        reload(running, "")
        await eventually(lambda: running.sections()["metrics"]["address"] is None, "gone")


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_told_and_stops_nothing(short_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with supervisor_running(short_dir, overrides={"metrics_port": port}) as running:
            await eventually(lambda: running.sections()["metrics"]["error"], "told")
            assert f"cannot listen at 127.0.0.1:{port}" in running.sections()["metrics"]["error"]
            assert any("set another metrics_port" in text for text in events(running))


@pytest.mark.asyncio
async def test_a_client_that_sends_too_much_or_nothing_costs_nothing(short_dir: Path) -> None:
    port = free_port()
    async with supervisor_running(short_dir, overrides={"metrics_port": port}) as running:
        await eventually(lambda: running.sections()["metrics"]["address"], "it listens")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * (3 * LARGEST_REQUEST))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        assert (await ask(port, get(port)))[0] == 200
        silent.close()


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (get(9400), 200),
        (get(9400, "localhost:9400"), 200),
        (get(9400, "LOCALHOST"), 200),
        (get(9400, "[::1]:9400"), 200),
        (get(9400, "[::1]"), 200),
        (get(9400, path="/metrics?x=1"), 200),
        (get(9400, "evil.example"), 403),
        (get(9400, "evil.example:9400"), 403),
        (get(9400, "localhost.evil.example"), 403),
        (get(9400, "127.0.0.1:9400:1"), 403),
        (get(9400, "localhost:"), 403),
        ("GET /metrics HTTP/1.1\r\n\r\n", 403),
        ("GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 403),
        ("GET /metrics HTTP/0.9\r\nHost: localhost\r\n\r\n", 403),
        (get(9400, path="/"), 404),
        (get(9400, path="/metrics/../etc/passwd"), 404),
        (get(9400, method="POST"), 405),
        ("nonsense\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        ("GÉT /metrics HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_who_may_read_what(request_text: str, status: int) -> None:
    given = answer(request_text.encode(), lambda: "page\n").decode()
    assert given.startswith(f"HTTP/1.1 {status} ")
    assert ("page" in given) == (status == 200)


@given(st.binary(max_size=300))
def test_no_bytes_break_it(request_bytes: bytes) -> None:
    assert answer(request_bytes, lambda: "page\n").startswith(b"HTTP/1.1 ")


HOSTILE = 'a"b\\c\nd{e}=,# \x1b[31m\u2028'


def test_text_of_strangers_stays_inside_its_quotes() -> None:
    sections = {"node": {"name": HOSTILE, "version": "1", "id": None, "why": [{"gate": HOSTILE, "open": True}]}}
    metrics = parse(exposition(sections))
    ((labels, value),) = metrics["distensor_info"].samples.items()
    assert value == 1
    assert dict(labels)["node"] == HOSTILE.replace("\x1b", " ").replace("\u2028", " ")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=10,
    )
)
def test_sections_of_another_shape_give_a_page_all_the_same(value: Any) -> None:
    names = ("node", "hub", "devices", "workers", "jobs", "earnings")
    parse(exposition(dict.fromkeys(names, value)))


def test_what_is_there_twice_is_said_once() -> None:
    device = {"id": "cpu", "kind": "cpu", "name": "x", "slots": 2}
    page = parse(exposition({"devices": [device, device]}))
    assert list(page["distensor_device_slots"].samples.values()) == [2]


def test_a_gate_of_each_device_and_its_throttle_are_told_apart() -> None:
    why = [{"gate": "temperature", "open": name == "a", "device": name} for name in ("a", "b")]
    page = parse(exposition({"node": {"why": why}, "usage": {"duty": {"b": 0.74}, "bytes_day": 5, "bytes_month": 9}}))
    gates = {dict(labels)["device"]: value for labels, value in page["distensor_gate_open"].samples.items()}
    assert gates == {"a": 1, "b": 0}
    assert page["distensor_device_duty_ratio"].samples == {(("device", "b"),): 0.74}
    assert page["distensor_traffic_month_bytes"].samples == {(): 9}


def test_nothing_known_is_nothing_said_and_every_name_follows_the_rules() -> None:
    page = parse(exposition({}))
    assert set(page) == {"distensor_info", "distensor_state", "distensor_hub_connected", "distensor_workers"}
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        words = family.name.removesuffix("_total").split("_")
        assert not set(words[:-1]) & {"milliseconds", "ms", "mb", "percent"}
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert words[-1] not in {"s", "ms", "c", "w"}, f"use {', '.join(UNITS)}"


@pytest.mark.asyncio
async def test_the_page_holds_no_secret(short_dir: Path) -> None:
    async with supervisor_running(short_dir, environment={"DISTENSOR_JOIN_TOKEN": "dtj_planted"}) as running:
        await start_job(running, 0)
        sections = running.sections()
        assert "dtj_planted" not in exposition(sections) + json.dumps(sections)
        assert "pem" not in exposition(sections)


def test_bytes_between_replicas_are_a_workers_where_it_has_others() -> None:
    worker = {"job": "j", "epoch": 1, "rank": 0, "device": "cpu", "pid": 5}
    cost = {"how": "distro", "up": 10, "down": 30, "ring": 4000}
    page = parse(exposition({"workers": [{**worker, "replicas": cost}, {**worker, "rank": 1, "replicas": None}]}))
    (labels, value), *others = page["distensor_worker_replica_sent_bytes"].samples.items()
    assert (dict(labels)["rank"], dict(labels)["how"], value, others) == ("0", "distro", 10, [])
    assert list(page["distensor_worker_replica_ring_bytes"].samples.values()) == [4000]
