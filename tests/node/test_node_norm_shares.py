"""Every weight's gradient is added up by one rank of those that hold the same sums."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.node.norm_shares import norm_share

SIZES = st.dictionaries(st.text("ab/.0", min_size=1, max_size=4), st.integers(0, 1000), max_size=12)


@given(SIZES, st.integers(1, 5))
@settings(max_examples=60)
def test_shares_hold_each_weight_once_and_none_has_more_than_one_weight_too_many(
    sizes: dict[str, int], members: int
) -> None:
    shares = [norm_share(sizes, member=member, members=members) for member in range(members)]
    assert sorted(key for share in shares for key in share) == sorted(sizes)
    loads = [sum(sizes[key] for key in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_the_order_of_the_weights_does_not_matter() -> None:
    sizes = {"0/a": 5, "0/b": 5, "1/c": 9}
    backwards = dict(reversed(sizes.items()))
    assert [norm_share(sizes, member=member, members=2) for member in (0, 1)] == [{"1/c"}, {"0/a", "0/b"}]
    assert all(norm_share(sizes, member=m, members=2) == norm_share(backwards, member=m, members=2) for m in (0, 1))
