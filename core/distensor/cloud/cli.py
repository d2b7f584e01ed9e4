"""`distensor cloud`: a hub with an HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from distensor.comm.address import HubAddress, address_argument, parse_address
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.commandline import stop_when_told
from distensor.core.errors import ConfigError
from distensor.hub.app import Beside, HubConfig, Ready, run_hub
from distensor.hub.cli import config_of, guarded, hub_options, ready_text, ready_values
from distensor.hub.config_file import ConfiguredParser

DEFAULT_HTTP = "127.0.0.1:8080"


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    return guarded("distensor cloud", lambda: _cloud(cloud_parser().options(argv)))


def cloud_parser() -> ConfiguredParser:
    parser = ConfiguredParser(
        prog="distensor cloud",
        description="Run a hub with an HTTP API: accounts, keys, nodes, jobs, runs and metrics under /v1.",
        epilog="Everything of `distensor hub` holds here too. docs/api.md describes the API; /v1/openapi.json is it.",
    )
    hub_options(parser)
    http = parser.add_argument_group("the HTTP API")
    http.add_argument(
        "--http",
        type=address_argument,
        default=parse_address(DEFAULT_HTTP),
        metavar="HOST:PORT",
        help=f"where the API listens ({DEFAULT_HTTP}; port 0 takes a free one)",
    )
    http.add_argument(
        "--http-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name by which callers reach it; others than these and the one that it listens on are refused",
    )
    http.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM, with the chain")
    http.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")
    http.add_argument(
        "--plain-http", action="store_true", help="listen without TLS beyond this machine: a proxy in front speaks it"
    )
    http.add_argument(
        "--trust-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="believe what a proxy of this address says of who called (X-Forwarded-For)",
    )
    http.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="let pages of this web site call the API"
    )
    http.add_argument("--open-metrics", action="store_true", help="answer /metrics without a key")
    return parser


def _cloud(options: argparse.Namespace) -> int:
    config, told = config_of(options), _Told(as_json=options.json, tls=options.tls_certificate is not None)
    beside = _api(options, told)
    asyncio.run(_run(config, told, beside, exit_with_stdin=options.exit_with_stdin))
    return 0


def _api(options: argparse.Namespace, told: _Told) -> Beside:
    """Raises: ConfigError: an option is wrong, or the extra `cloud` is not installed."""
    try:
        from distensor.cloud.serving import http_beside
        from distensor.cloud.settings import CloudSettings, TlsFiles
    except ImportError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'distensor[cloud]'") from error
    files = options.tls_certificate, options.tls_key
    if (files[0] is None) != (files[1] is None):
        raise ConfigError("--tls-certificate and --tls-key: give both or none")
    settings = CloudSettings(
        listen=options.http,
        hosts=tuple(options.http_host),
        origins=tuple(options.cors_origin),
        tls=None if files[0] is None else TlsFiles(certificate=files[0], key=files[1]),
        proxies=tuple(options.trust_proxy),
        plain=options.plain_http,
        open_metrics=options.open_metrics,
    )
    return http_beside(settings, told.listens)


class _Told:
    """What is printed once both hub and API accept connections."""

    def __init__(self, *, as_json: bool, tls: bool) -> None:
        self._as_json = as_json
        self._scheme = "https" if tls else "http"
        self._url = ""

    def listens(self, address: HubAddress) -> None:
        self._url = f"{self._scheme}://{address}"

    def ready(self, ready: Ready) -> None:
        if self._as_json:
            print(json.dumps({**ready_values(ready), "http": self._url}), flush=True)
        else:
            print(
                f"{ready_text(ready)}\n\nHTTP API at {self._url}/v1, described by {self._url}/v1/openapi.json",
                flush=True,
            )


async def _run(config: HubConfig, told: _Told, beside: Beside, *, exit_with_stdin: bool) -> None:
    stop = asyncio.Event()
    stop_when_told(stop, with_stdin=exit_with_stdin)
    await run_hub(config, clock=SYSTEM_CLOCK, on_ready=told.ready, log=_log, stop=stop, beside=beside)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
