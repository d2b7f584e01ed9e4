"""When a `fit` may go on after its state was lost."""

from __future__ import annotations

import pytest

from distensor.core.errors import JobFailedError, StateLostError
from distensor.training.standing import Standing

LOST = StateLostError("nobody holds stage 1")


@pytest.mark.parametrize(("step", "began"), [(4, 4), (6, 4), (0, 0)])
def test_from_a_checkpoint_of_this_fit_or_of_its_beginning_it_goes_on(step: int, began: int) -> None:
    standing = Standing("t")
    standing.check_regained(LOST, step, began)
    standing.check_alive()


def test_an_older_checkpoint_knows_nothing_of_this_fits_data() -> None:
    standing = Standing("t")
    with pytest.raises(
        StateLostError, match="stage 1; the latest checkpoint is of step 3, and this fit began after step 4"
    ):
        standing.check_regained(LOST, 3, 4)
    with pytest.raises(JobFailedError, match="has ended"):
        standing.check_alive()


def test_without_a_checkpoint_it_has_ended() -> None:
    standing = Standing("t")
    with pytest.raises(StateLostError), standing.noting_failure():
        raise LOST
    assert not standing.failure, "a resume may still bring it back"
    with pytest.raises(StateLostError, match="no checkpoint to go on from"):
        standing.check_regained(LOST, 4, 0)
    assert standing.failure
