"""Where one unit stands when this node's record and the hub's are laid side by side. Pure.

here      at the hub                        standing
claimed   credited, same size               MATCHED
claimed   credited, another size            REFUSED   (the two sides do not say the same)
claimed   claimed and received differ       REFUSED   (credited never)
claimed   claimed, no receipt               UNCONFIRMED
claimed   received only, or nothing         UNCONFIRMED, MISSING_THERE once it is older than GRACE_SECONDS
nothing   credited                          MISSING_HERE
nothing   anything else                     None: no money has moved, and no claim of ours is known
"""

from __future__ import annotations

from enum import StrEnum

from distensor.core.statement import HubUnit, UnitState

GRACE_SECONDS = 120.0
"""Claims travel within a second; one that the hub lacks for so long while it answers has been lost."""


class Standing(StrEnum):
    """The result of the comparison."""

    MATCHED = "matched"
    UNCONFIRMED = "unconfirmed"
    REFUSED = "refused"
    MISSING_HERE = "missing_here"
    MISSING_THERE = "missing_there"

    @property
    def open(self) -> bool:
        """The hub may still change its mind."""
        return self in (Standing.UNCONFIRMED, Standing.MISSING_THERE)


def standing(claimed: int | None, hub: HubUnit | None, age: float) -> Standing | None:
    """`claimed` is this node's size of the unit in micro-batches; `age` is how many seconds ago it was claimed."""
    if hub is not None and hub.state is UnitState.CREDITED:
        return _credited(claimed, hub)
    if claimed is None:
        return None
    if hub is not None and hub.state is UnitState.MISMATCHED:
        return Standing.REFUSED
    if hub is not None and hub.state is UnitState.CLAIMED:
        return Standing.UNCONFIRMED
    return Standing.MISSING_THERE if age > GRACE_SECONDS else Standing.UNCONFIRMED


def _credited(claimed: int | None, hub: HubUnit) -> Standing:
    if claimed is None:
        return Standing.MISSING_HERE
    return Standing.MATCHED if claimed == hub.claimed else Standing.REFUSED
