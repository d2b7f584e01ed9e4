"""What every request meets: problems, host check, size limit, ids, headers, CORS, TLS."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme
from cloud_kit import LOOPBACK, CloudHub, Reply
from hub_kit import until

from distensor.cloud.problems import MEDIA_TYPE
from distensor.cloud.serving import http_beside, listening
from distensor.cloud.settings import LARGEST_BODY, CloudSettings, TlsFiles
from distensor.comm.address import HubAddress
from distensor.comm.keys import KeyKind
from distensor.core.errors import ConfigError, ReadOnlyError


def is_problem(reply: Reply, status: int) -> str:
    """What it says, once it has been seen to be a problem of this status."""
    assert (reply.status, reply.headers["content-type"]) == (status, MEDIA_TYPE), reply
    assert reply.json["status"] == status
    assert reply.json["instance"] == reply.headers["x-request-id"]
    return str(reply.json["detail"])


def test_every_error_is_a_problem(hub: CloudHub) -> None:
    admin = hub.client()
    assert is_problem(admin.get("/v1/nothing"), 404) == "there is nothing at this path"
    wrong = admin.ask("DELETE", "/v1/accounts")
    assert is_problem(wrong, 405) == "this path does not take this method"
    assert set(wrong.headers["allow"].split(", ")) <= {"GET", "POST"}
    is_problem(admin.get("/v1/accounts?limit=0"), 422)
    is_problem(admin.get("/v1/accounts/nobody"), 404)
    is_problem(admin.post("/v1/accounts", b"{"), 422)
    is_problem(admin.post("/v1/accounts", b"\xff\xfe"), 422)
    is_problem(hub.stranger().get("/v1/me"), 401)
    is_problem(hub.client("me", KeyKind.TRAINER).get("/v1/audit"), 403)


def test_what_is_wrong_is_named_and_never_repeated(hub: CloudHub) -> None:
    sent = {"account": "me", "kind": "trainer", "secret": "dt_u_do-not-repeat", "days": "dt_u_nor-this"}
    reply = hub.client().post("/v1/keys", sent)
    is_problem(reply, 422)
    assert {one["where"] for one in reply.json["errors"]} == {"body.secret", "body.days"}
    assert b"dt_u_" not in reply.body


def test_an_unknown_filter_is_refused_by_name(hub: CloudHub) -> None:
    admin = hub.client()
    assert "'acount' is unknown here; expected account, after" in is_problem(admin.get("/v1/keys?acount=me"), 422)
    is_problem(admin.get("/v1/me?key=1"), 422)
    is_problem(hub.stranger().get("/v1/health/live?x=1"), 422)


def test_a_defect_is_a_problem_with_an_id_and_its_story_is_in_the_log(
    hub: CloudHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("the secret of the house")

    monkeypatch.setattr(hub.inside.machine, "mesh", broken)
    reply = hub.client().get("/v1/nodes", X_Request_Id="find-me")
    assert is_problem(reply, 500) == "a defect of the hub"
    assert reply.json["instance"] == "find-me"
    assert b"secret" not in reply.body
    told = "the secret of the house"
    hub.do(until(lambda: any("find-me" in line and told in line for line in hub.hub.lines)))


def test_books_that_cannot_be_written_are_said(hub: CloudHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise ReadOnlyError("the disk is full")

    monkeypatch.setattr(hub.inside.writer, "require_writable", full)
    admin = hub.client()
    reply = admin.post("/v1/accounts", {"account": "full", "kinds": ["trainer"]})
    assert "disk is full" in is_problem(reply, 503)
    assert reply.headers["retry-after"] == "60"
    assert "disk" not in is_problem(hub.stranger().get("/v1/health/ready"), 503)
    assert hub.stranger().get("/v1/health/live").status == 200
    assert admin.get("/v1/accounts/me").status == 200
    assert b"distensor_hub_writable 0.0" in admin.get("/metrics").body


def test_another_host_name_is_refused(hub: CloudHub) -> None:
    stranger = hub.stranger()
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[::2]:80"):
        is_problem(stranger.get("/v1/health/live", Host=host), 421)
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1:8080", "[::1]:1"):
        assert stranger.get("/v1/health/live", Host=host).status == 200


def test_a_large_body_is_refused_also_when_it_comes_in_pieces(hub: CloudHub) -> None:
    admin = hub.client()
    is_problem(admin.post("/v1/accounts", b"x" * (LARGEST_BODY + 1)), 413)
    connection = http.client.HTTPConnection(hub.address.host, hub.address.port, timeout=30)
    pieces = (b"x" * 9000 for _ in range(8))
    headers = {"Authorization": f"Bearer {admin.key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/accounts", pieces, headers, encode_chunked=True)
    with closing(connection), connection.getresponse() as answer:
        assert answer.status == 413


def test_every_answer_has_an_id_and_the_headers_of_an_api(hub: CloudHub) -> None:
    for reply in (hub.stranger().get("/v1/health/live"), hub.stranger().get("/nothing"), hub.client().get("/v1/me")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        assert reply.headers["cache-control"] == "no-store"
        assert len(reply.headers["x-request-id"]) == 16
        assert "server" not in reply.headers
        assert "access-control-allow-origin" not in reply.headers
    odd = hub.stranger().get("/v1/health/live", X_Request_Id="a b\x7f")
    assert odd.headers["x-request-id"] != "a b\x7f"


def test_no_page_of_another_site_may_call_it(hub: CloudHub) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
    reply = hub.stranger().ask("OPTIONS", "/v1/nodes", headers=asked)
    assert reply.status == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_key_counts_in_the_header_only(hub: CloudHub) -> None:
    key = hub.key("me", KeyKind.ADMIN)
    stranger = hub.stranger()
    for path in (f"/v1/me?key={key}", f"/v1/me?access_token={key}", f"/v1/me?authorization=Bearer%20{key}"):
        is_problem(stranger.get(path), 401)
    for value in (f"Basic {key}", key, f"Bearer {key}x", f"Bearer  {key}", "Bearer", f"Bearer {key[:-1]}"):
        reply = stranger.get("/v1/me", Authorization=value)
        assert key not in is_problem(reply, 401)
        assert reply.headers["www-authenticate"].startswith("Bearer")
    assert stranger.get("/v1/me", Cookie=f"key={key}").status == 401
    assert stranger.get("/v1/me", Authorization=f"bearer {key}").status == 200


def test_metrics_are_text_for_prometheus(hub: CloudHub) -> None:
    admin = hub.client()
    admin.get("/v1/accounts/me")
    reply = admin.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = reply.body.decode().splitlines()
    assert "distensor_nodes_connected 1.0" in lines
    assert "distensor_workers 8.0" in lines
    assert "distensor_workers_free 6.0" in lines
    assert any(
        line.startswith('distensor_http_requests_total{method="GET",route="/v1/accounts/{account}"') for line in lines
    )
    assert "/v1/accounts/me" not in reply.body.decode()


@pytest.mark.asyncio
async def test_the_parts_of_an_answer_do_not_wait_for_each_other() -> None:
    undelayed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        undelayed.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listening(LOOPBACK.listen) as sock:
        async with await asyncio.start_server(answer, sock=sock):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await undelayed
            writer.close()
            await writer.wait_closed()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CloudHub, ssl.SSLContext]]:
    path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("hub.example.org")
    issued.private_key_pem.write_to_path(path / "key.pem")
    (path / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    settings = CloudSettings(
        listen=HubAddress(host="127.0.0.1", port=0),
        hosts=("Hub.example.org",),
        origins=("https://console.example.org",),
        tls=TlsFiles(certificate=path / "chain.pem", key=path / "key.pem"),
        proxies=("127.0.0.1",),
        open_metrics=True,
    )
    with CloudHub(path, settings) as running:
        yield running, trust


def test_tls_a_name_and_a_site_that_are_allowed(tls: tuple[CloudHub, ssl.SSLContext]) -> None:
    hub, trust = tls
    raw = socket.create_connection((hub.address.host, hub.address.port), timeout=30)
    with trust.wrap_socket(raw, server_hostname="hub.example.org") as secure:
        connection = http.client.HTTPConnection("hub.example.org")
        connection.sock = secure
        connection.request("GET", "/v1/health/live", headers={"Origin": "https://console.example.org"})
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "live"})
        assert answer.getheader("Access-Control-Allow-Origin") == "https://console.example.org"
        assert answer.getheader("Strict-Transport-Security") == "max-age=31536000"
        connection.request("GET", "/v1/health/live", headers={"Origin": "https://evil.example"})
        answer = connection.getresponse()
        answer.read()
        assert answer.getheader("Access-Control-Allow-Origin") is None
        connection.request("GET", "/metrics")
        with connection.getresponse() as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"listen": HubAddress(host="0.0.0.0", port=1)}, "keys would travel unencrypted"),
        ({"hosts": ("hub.example.org:80",)}, "expected a host name or an address, without a port"),
        ({"origins": ("*",)}, "expected scheme://host"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CloudSettings(**{"listen": LOOPBACK.listen, **wrong})  # type: ignore[arg-type]


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    files = TlsFiles(certificate=tmp_path / "x.pem", key=tmp_path / "x.pem")
    with pytest.raises(ConfigError, match=r"--tls-certificate .*x\.pem"):
        http_beside(CloudSettings(listen=LOOPBACK.listen, tls=files), lambda _: None)
