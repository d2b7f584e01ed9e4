"""State of one number of replicas, shared out to another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import ConfigError
from distensor.core.replica_shares import replica_shares


@pytest.mark.parametrize(
    ("of", "saved", "expected"),
    [
        (2, 2, [{0: 1.0}, {1: 1.0}]),
        (4, 2, [{0: 1.0}, {0: 1.0}, {1: 1.0}, {1: 1.0}]),
        (2, 4, [{0: 0.5, 1: 0.5}, {2: 0.5, 3: 0.5}]),
        (3, 2, [{0: 1.0}, {0: 0.5, 1: 0.5}, {1: 1.0}]),
        (3, 1, [{0: 1.0}] * 3),
        (1, 2, [{0: 0.5, 1: 0.5}]),
    ],
)
def test_by_example(of: int, saved: int, expected: list[dict[int, float]]) -> None:
    assert [replica_shares(replica, of=of, saved=saved) for replica in range(of)] == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20))
def test_the_mean_over_all_replicas_stays(of: int, saved: int) -> None:
    taken = dict.fromkeys(range(saved), 0.0)
    for replica in range(of):
        shares = replica_shares(replica, of=of, saved=saved)
        assert sum(shares.values()) == pytest.approx(1.0)
        assert all(share > 0 for share in shares.values())
        for other, share in shares.items():
            taken[other] += share / of
    assert list(taken.values()) == pytest.approx([1.0 / saved] * saved)


@pytest.mark.parametrize(("replica", "of", "saved"), [(2, 2, 1), (-1, 2, 2), (0, 1, 0)])
def test_what_is_no_replica(replica: int, of: int, saved: int) -> None:
    with pytest.raises(ConfigError, match="expected a replica"):
        replica_shares(replica, of=of, saved=saved)
