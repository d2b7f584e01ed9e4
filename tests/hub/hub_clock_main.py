"""A hub whose wall clock is off by the number of seconds in a file, which the test changes while the hub runs."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

from distensor.comm.address import parse_address
from distensor.core.clock import SystemClock
from distensor.hub.app import HubConfig, Ready, run_hub
from distensor.hub.machine import Patience


class WrongClock(SystemClock):
    """Monotonic time is right, as it is on every machine; what `now` says is not."""

    __slots__ = ("_file",)

    def __init__(self, file: Path) -> None:
        self._file = file

    def now(self) -> float:
        return super().now() + float(self._file.read_text())


def tell(ready: Ready) -> None:
    facts = {
        "address": str(ready.address),
        "node_tokens": list(ready.node_tokens),
        "trainer_token": ready.trainer_token,
        "generation": ready.generation,
    }
    print(json.dumps(facts), flush=True)


async def main(state: str, listen: str, tokens: str, clock_file: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end_with_stdin() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    config = HubConfig(
        state=Path(state),
        listen=parse_address(listen, allow_port_zero=True),
        node_tokens=int(tokens),
        patience=Patience(heartbeat=0.2, silent_heartbeats=25),
    )
    await run_hub(config, clock=WrongClock(Path(clock_file)), on_ready=tell, log=print_error, stop=stop)


def print_error(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
