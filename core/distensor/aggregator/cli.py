"""`distensor aggregator`: take one copy of each replica's sparse update, and hand everybody the set of all."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import sys
from pathlib import Path

import platformdirs

from distensor.aggregator.service import AggregatorService, Terms
from distensor.comm import NodeLink
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.commandline import Exit, UsageParser, status_of, stop_when_told
from distensor.core.errors import ConfigError

VARIABLES = ("DISTENSOR_API_KEY", "DISTENSOR_JOIN_TOKEN")
MEGABYTE, GIGABYTE = 10**6, 10**9
MEGABIT = 1e6 / 8


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    return status_of("distensor aggregator", lambda: _aggregator(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="distensor aggregator",
        description="Take one copy of each replica's sparse update and hand everybody the set of all, for jobs of one "
        "hub with sync_options={'topology': 'aggregator'} or 'hybrid'. It computes nothing and earns nothing.",
        epilog="The key is one that `distensor hub token` prints, in the environment: "
        "DISTENSOR_API_KEY=dtj_... distensor aggregator --host 192.0.2.7. It is needed once.",
    )
    default = Path(platformdirs.user_state_dir("distensor")) / "aggregator"
    parser.add_argument("--state", type=Path, default=default, help="where its identity is kept (%(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address of this machine that replicas reach, and no other (%(default)s)"
    )
    parser.add_argument("--name", default=_own_name(), help="as jobs name it (%(default)s)")
    parser.add_argument("--jobs", type=int, default=8, metavar="N", help="at once (%(default)s)")
    parser.add_argument(
        "--message-megabytes", type=float, default=256.0, metavar="MB", help="that one update may have (%(default)g)"
    )
    parser.add_argument(
        "--job-gigabytes", type=float, metavar="GB", help="that may pass for one epoch of a job (no limit)"
    )
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of one job, each way (no limit)")
    parser.add_argument("--json", action="store_true", help="print lines of JSON instead of text")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end when standard input does (for programs that start one)"
    )
    return parser


def _own_name() -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node().split(".")[0]).strip("-._")
    return f"{name or 'this'}-aggregator"[:63]


def _aggregator(options: argparse.Namespace) -> int:
    terms = Terms(
        name=options.name,
        host=options.host,
        slots=options.jobs,
        message_bytes=int(options.message_megabytes * MEGABYTE),
        job_bytes=None if options.job_gigabytes is None else int(options.job_gigabytes * GIGABYTE),
        rate=None if options.rate is None else options.rate * MEGABIT,
    )
    token = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    try:
        options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--state {options.state}: {error.strerror}; it must be a folder of yours") from error
    asyncio.run(_run(terms, token, options))
    return Exit.OK


async def _run(terms: Terms, token: str | None, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_when_told(stop, with_stdin=options.exit_with_stdin)
    told = asyncio.Event()

    def connected() -> None:
        if told.is_set():
            return
        told.set()
        if options.json:
            print(json.dumps({"v": 1, "event": "connected", "name": terms.name}), flush=True)
        else:
            print(f"disTensor aggregator {terms.name!r} at {terms.host}. Ctrl-C ends it.", flush=True)

    service = AggregatorService(terms, SYSTEM_CLOCK, _log, connected)
    link = NodeLink(token, options.state / "credential.json", service.describe, service.running, service)
    service.link = link
    running = asyncio.ensure_future(link.run())
    try:
        await asyncio.wait([running, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        service.close()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
