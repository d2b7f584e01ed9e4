"""One unit, this node's record beside the hub's."""

from __future__ import annotations

import pytest

from distensor.core.control import UnitKey
from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.statement import HubUnit, UnitState
from distensor_server.income.standing import GRACE_SECONDS, Standing, standing

KEY = UnitKey(job_id=JobId("j_1"), epoch=Epoch(1), step=3, rank=Rank(0))


def hub(state: UnitState, claimed: int | None = None, received: int | None = None, micro: int = 0) -> HubUnit:
    return HubUnit(key=KEY, state=state, claimed=claimed, received=received, micro=micro)


CREDITED = hub(UnitState.CREDITED, 4, 4, 4000)
CLAIMED = hub(UnitState.CLAIMED, 4)
RECEIVED = hub(UnitState.RECEIVED, None, 4)
MISMATCHED = hub(UnitState.MISMATCHED, 4, 3)


@pytest.mark.parametrize(
    ("claimed", "there", "age", "expected"),
    [
        (4, CREDITED, 0.0, Standing.MATCHED),
        (5, CREDITED, 0.0, Standing.REFUSED),
        (4, MISMATCHED, 0.0, Standing.REFUSED),
        (4, CLAIMED, 1e9, Standing.UNCONFIRMED),
        (4, RECEIVED, 0.0, Standing.UNCONFIRMED),
        (4, RECEIVED, GRACE_SECONDS + 1, Standing.MISSING_THERE),
        (4, None, GRACE_SECONDS, Standing.UNCONFIRMED),
        (4, None, GRACE_SECONDS + 1, Standing.MISSING_THERE),
        (4, None, -500.0, Standing.UNCONFIRMED),
        (None, CREDITED, 0.0, Standing.MISSING_HERE),
        (None, RECEIVED, 1e9, None),
        (None, CLAIMED, 1e9, None),
        (None, MISMATCHED, 1e9, None),
        (None, None, 1e9, None),
    ],
)
def test_every_combination_has_its_word(
    claimed: int | None, there: HubUnit | None, age: float, expected: Standing | None
) -> None:
    assert standing(claimed, there, age) is expected


def test_only_what_may_still_be_credited_is_open() -> None:
    assert {kind for kind in Standing if kind.open} == {Standing.UNCONFIRMED, Standing.MISSING_THERE}
