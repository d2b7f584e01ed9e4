"""A router of our own: it answers searches (SSDP), describes itself (XML over HTTP) and notes forwardings (SOAP).

The real protocols over real sockets of this machine's loopback; what it was asked is there to be looked at.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP, SSDP_PORT = "239.255.255.250", 1900
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_DEVICE = "urn:schemas-upnp-org:device:"


@dataclass
class FakeRouter:
    """`mapped`: external port to (address, port, seconds). Everything is decided by the fields of the moment."""

    external: str = "93.184.216.34"
    permanent_only: bool = False
    """It knows no lease that ends, as many cheap ones."""
    refused: frozenset[int] = frozenset()
    """Ports that somebody else has."""
    mapped: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, action: str, fields: dict[str, str]) -> tuple[int, dict[str, str]]:
        """HTTP status and fields of the answer; on a status of 500 `error` is the number."""
        self.asked.append(action)
        if action == "GetStatusInfo":
            return 200, {"NewConnectionStatus": "Connected", "NewLastConnectionError": "ERROR_NONE", "NewUptime": "9"}
        if action == "GetExternalIPAddress":
            return 200, {"NewExternalIPAddress": self.external}
        if action == "AddPortMapping":
            return self._add(fields)
        if action == "DeletePortMapping":
            known = self.mapped.pop(int(fields["NewExternalPort"]), None)
            return (500, {"error": "714"}) if known is None else (200, {})
        return 500, {"error": "401"}

    def _add(self, fields: dict[str, str]) -> tuple[int, dict[str, str]]:
        port, seconds = int(fields["NewExternalPort"]), int(fields["NewLeaseDuration"])
        if self.permanent_only and seconds:
            return 500, {"error": "725"}
        if port in self.refused:
            return 500, {"error": "718"}
        assert fields["NewProtocol"] == "TCP"
        self.mapped[port] = (fields["NewInternalClient"], int(fields["NewInternalPort"]), seconds)
        return 200, {}


def _description(base: str) -> str:
    return f"""<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor></specVersion>
<URLBase>{base}</URLBase>
<device><deviceType>{_DEVICE}InternetGatewayDevice:1</deviceType><friendlyName>Fake</friendlyName>
<UDN>uuid:1</UDN><deviceList><device><deviceType>{_DEVICE}WANDevice:1</deviceType><UDN>uuid:2</UDN>
<serviceList><service><serviceType>urn:schemas-upnp-org:service:WANCommonInterfaceConfig:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANCommonIFC1</serviceId><controlURL>/common</controlURL>
<eventSubURL>/e</eventSubURL><SCPDURL>/c.xml</SCPDURL></service></serviceList>
<deviceList><device><deviceType>{_DEVICE}WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/e</eventSubURL><SCPDURL>/s.xml</SCPDURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>"""


def _soap(action: str, fields: dict[str, str]) -> str:
    if "error" in fields:
        inner = (
            "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
            '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0">'
            f"<errorCode>{fields['error']}</errorCode><errorDescription>no</errorDescription></UPnPError></detail></s:Fault>"
        )
    else:
        words = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        inner = f'<u:{action}Response xmlns:u="{SERVICE}">{words}</u:{action}Response>'
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{inner}</s:Body></s:Envelope>'
    )


def _handler(router: FakeRouter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, _description(router.url.rsplit("/", 1)[0]))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            action = self.headers["SOAPAction"].strip('"').split("#")[1]
            fields = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
            status, answered = router.answer(action, fields)
            self._say(status, _soap(action, answered))

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", 'text/xml; charset="utf-8"')
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name at the base
            """Nothing: the tests look at `asked`."""

    return Handler


@contextmanager
def serving(router: FakeRouter) -> Iterator[FakeRouter]:
    """The router's web server; `router.url` is its description."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(router)) as server:
        router.url = f"http://127.0.0.1:{server.server_port}/root.xml"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield router
        finally:
            server.shutdown()
            thread.join(20)


@contextmanager
def announcing(router: FakeRouter) -> Iterator[None]:
    """Answers searches on the loopback interface. Raises OSError where it has no multicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is the protocol's: others share it
        listening.bind((GROUP, SSDP_PORT))
        membership = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton("127.0.0.1"))
        listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        listening.settimeout(0.05)
        over = threading.Event()
        thread = threading.Thread(target=_answer_searches, args=(listening, router, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(20)


def _answer_searches(listening: socket.socket, router: FakeRouter, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(TimeoutError):
            data, asker = listening.recvfrom(2048)
            target = re.search(rb"(?im)^ST: *(\S+)", data)
            if data.startswith(b"M-SEARCH") and target is not None:
                kind = target[1].decode()
                answer = (
                    f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: {kind}\r\nUSN: uuid:1::{kind}\r\n"
                    f"EXT:\r\nSERVER: Fake/1 UPnP/1.1\r\nLOCATION: {router.url}\r\n\r\n"
                )
                listening.sendto(answer.encode(), asker)
