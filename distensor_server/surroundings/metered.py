"""Whether the network is metered: NetworkManager knows; without it nobody does."""

from __future__ import annotations

from distensor.core.reading import Reading, Unavailable
from distensor_server.surroundings.ask import Ask

_METERED = (
    "busctl",
    "--system",
    "get-property",
    "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "Metered",
)
_ANSWERS: dict[str, Reading[bool]] = {
    "u 0": Unavailable(reason="NetworkManager does not know"),
    "u 1": True,
    "u 2": False,
    "u 3": True,
    "u 4": False,
}
"""NMMetered: unknown, yes, no, guessed yes, guessed no. A guess counts, as its documentation advises."""


async def is_metered(ask: Ask, *, platform: str) -> Reading[bool]:
    if platform == "darwin":
        return Unavailable(reason="macOS does not tell programs")
    told = await ask(_METERED)
    if isinstance(told, Unavailable):
        return Unavailable(reason=f"NetworkManager cannot be asked ({told.reason})")
    return _ANSWERS.get(told.strip(), Unavailable(reason=f"NetworkManager answered {told.strip()!r:.40}"))
