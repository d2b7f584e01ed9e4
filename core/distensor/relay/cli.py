"""`distensor relay`: forward encrypted bytes between members of jobs who cannot reach each other."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys

from distensor.comm.address import address_argument, parse_address
from distensor.comm.bootstrap import fetch_authority
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.commandline import Exit, UsageParser, status_of, stop_when_told
from distensor.relay.desk import Caps
from distensor.relay.server import Relay, serve

DEFAULT_LISTEN = "127.0.0.1:50052"
HUB_SECONDS = 10.0
GIGABYTE = 10**9
MEGABIT = 1e6 / 8


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    return status_of("distensor relay", lambda: _relay(_parser().parse_args(argv)))


def _fingerprint(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected the 64 hexadecimal digits that the hub prints")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="distensor relay",
        description="Forward encrypted bytes between members of one hub's jobs who cannot reach each other. The relay "
        "sees who talks to whom and how much, and nothing of what they say.",
        epilog="Tell the members of it by starting the hub with --relay HOST:PORT.",
    )
    parser.add_argument(
        "--hub", type=address_argument, required=True, metavar="HOST:PORT", help="whose members may use it"
    )
    parser.add_argument(
        "--authority", type=_fingerprint, required=True, metavar="SHA256", help="fingerprint of the hub's authority"
    )
    parser.add_argument(
        "--listen",
        type=address_argument,
        default=parse_address(DEFAULT_LISTEN),
        metavar="HOST:PORT",
        help=f"where to accept connections ({DEFAULT_LISTEN}; port 0 takes a free one)",
    )
    caps = Caps()
    parser.add_argument("--connections", type=int, default=caps.connections, metavar="N", help="at once (%(default)s)")
    parser.add_argument(
        "--job-connections", type=int, default=caps.job_connections, metavar="N", help="of one job (%(default)s)"
    )
    parser.add_argument(
        "--job-gigabytes",
        type=float,
        default=caps.job_bytes / GIGABYTE,
        metavar="GB",
        help="that one job may have forwarded, both ways together (%(default)g)",
    )
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of all together (no limit)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end when standard input does (for programs that start a relay)"
    )
    return parser


def _relay(options: argparse.Namespace) -> int:
    caps = Caps(
        connections=options.connections,
        job_connections=options.job_connections,
        job_bytes=int(options.job_gigabytes * GIGABYTE),
        rate=None if options.rate is None else options.rate * MEGABIT,
    )
    authority = fetch_authority(options.hub, options.authority, HUB_SECONDS)
    asyncio.run(_run(authority, caps, options))
    return Exit.OK


async def _run(authority: str, caps: Caps, options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_when_told(stop, with_stdin=options.exit_with_stdin)
    relay = Relay(authority, caps, SYSTEM_CLOCK, _log)
    async with serve(relay, options.listen) as address:
        if options.json:
            print(json.dumps({"v": 1, "event": "ready", "address": str(address)}), flush=True)
        else:
            print(f"disTensor relay at {address} for the hub at {options.hub}. Ctrl-C ends it.", flush=True)
        await stop.wait()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
