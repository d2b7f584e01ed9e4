"""Passwords planted in every proxy variable, and everything that could repeat one."""

from __future__ import annotations

import json
import socket
from typing import Any

import grpc
import pytest

from distensor.comm.address import HubAddress
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.channels import open_channel
from distensor.comm.failures import error_of_status
from distensor.core.errors import HubUnreachableError
from distensor.proto import control_pb2 as pb
from distensor.proto.control_pb2_grpc import ControlStub
from distensor_server.doctor import network
from distensor_server.redact import Redactor
from distensor_server.updates import fetch_https
from distensor_server.verbs.bugreport import _redactor, _shown

NAMES = [name for low in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in (low, low.upper())]
PASSWORDS = ("s3cretpw", "pa/ss@w0rd?#", "%40tail%2Fpw")
HUB = HubAddress(host="hub.example.org", port=50051)
NOWHERE = "127.0.0.1:1"
"""Nobody listens at port 1."""


@pytest.fixture(params=PASSWORDS)
def secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The password that stands in all of them."""
    for name in NAMES:
        monkeypatch.setenv(name, f"http://ann:{request.param}@{NOWHERE}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    return str(request.param)


def leaks(secret: str, *texts: str) -> list[str]:
    parts = {secret, *(part for part in secret.replace("?", "/").replace("@", "/").split("/") if len(part) > 3)}
    return [text for text in texts for part in parts if part in text]


def test_a_hub_that_is_not_reached_names_the_proxy_and_not_its_password(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_given: Any, **_more: Any) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(HubUnreachableError) as first:
        fetch_authority(HUB, "ab" * 32, timeout=1)
    with open_channel(HUB, "") as channel, pytest.raises(grpc.RpcError) as failed:
        ControlStub(channel).QueryMesh(pb.QueryMeshRequest(), timeout=5)
    call: Any = failed.value
    second = error_of_status(call.code(), call.details(), HUB)
    assert isinstance(second, HubUnreachableError)
    for text in (str(first.value), str(second)):
        assert f"http_proxy=http://{NOWHERE}" in text
    assert leaks(secret, str(first.value), str(second)) == []


def test_the_update_check_says_what_failed_and_no_password(secret: str) -> None:
    with pytest.raises(OSError) as failed:
        fetch_https("https://updates.example/index.json")
    assert leaks(secret, str(failed.value), repr(failed.value)) == []


@pytest.mark.parametrize("value", ["http:/ann:s3cretpw@proxy", "http://ann:s3cretpw", "http://[s3cretpw:"])
def test_a_malformed_proxy_is_an_oserror_without_its_text(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError) as failed:
        fetch_https("https://updates.example/index.json")
    assert "s3cretpw" not in str(failed.value)


def test_the_report_and_the_doctor_hold_no_password(secret: str) -> None:
    environment = dict.fromkeys([*NAMES, "pip_proxy"], f"http://ann:{secret}@{NOWHERE}") | {"no_proxy": "10.0.0.0/8"}

    class World:
        key = None
        hub = HUB

        def __init__(self) -> None:
            self.environment = environment

    world: Any = World()
    redactor: Redactor = _redactor(world, environment, hide_addresses=False)
    shown = redactor.environment(_shown(environment))
    assert shown == dict.fromkeys([*NAMES, "pip_proxy"], f"http://{NOWHERE}") | {"no_proxy": "10.0.0.0/8"}
    log = redactor.text(f"gave up on {environment['http_proxy']}: {secret} was refused")
    said = network.proxy(world)
    assert leaks(secret, json.dumps(shown), log, said.finding, said.fix) == []
