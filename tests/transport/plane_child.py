"""Rank 0 in a process of its own, without torch: it sends until its peer is lost, then tries to come back.

Standard input, one JSON line: job, epoch, key, certificate, authority, port, work. Standard output, a JSON line at each
stage: {"event": "open"}, {"event": "lost", "reason": ...}, {"event": "back", "reason": ...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from distensor.core.errors import PeerLostError, TransportError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.transport import Address, Channel, Credentials, DataPlane, PeerId, Tag, Timeouts


def tell(event: str, reason: str = "") -> None:
    print(json.dumps({"event": event, "reason": reason}), flush=True)


def send(plane: DataPlane) -> None:
    """Megabytes without an end, so that whatever happens, happens inside a frame."""
    body = bytes(4 << 20)
    while True:
        plane.send(1, Tag(Channel.GRADIENT), b"", [body]).wait()


def compute(plane: DataPlane) -> None:
    """One product that takes many seconds, as a large stage does, and then a word."""
    import torch

    torch.set_num_threads(1)
    size = 7168
    torch.ones(size, size) @ torch.ones(size, size)
    plane.send(1, Tag(Channel.GRADIENT), b"done").wait()
    plane.recv(1, Tag(Channel.GRADIENT))


WORK: dict[str, Callable[[DataPlane], None]] = {"send": send, "compute": compute}


def main() -> None:
    order = json.loads(sys.stdin.readline())
    me = PeerId(job_id=JobId(order["job"]), epoch=Epoch(order["epoch"]), rank=Rank(0))
    credentials = Credentials(
        key_pem=order["key"].encode(), certificate_pem=order["certificate"], authority_pem=order["authority"]
    )
    peers = {1: Address(host="127.0.0.1", port=order["port"])}
    with DataPlane.open(me, credentials, None, peers, driver=False) as plane:
        tell("open")
        try:
            WORK[order["work"]](plane)
        except PeerLostError as error:
            tell("lost", error.reason)
    try:
        with DataPlane.open(me, credentials, None, peers, timeouts=Timeouts(connect=10.0), driver=False):
            tell("back", "it was let in again")
    except TransportError as error:
        tell("back", str(error))


if __name__ == "__main__":
    main()
