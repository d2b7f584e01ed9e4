"""Ids, errors, clock and readings."""

from __future__ import annotations

import asyncio
import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core import SYSTEM_CLOCK, Unavailable, errors, value_or
from distensor.core.ids import is_valid_name, new_job_id, new_node_id


@pytest.mark.parametrize("name", ["a", "atlas-3", "A.b_c", "7", "x" * 63])
def test_good_names(name: str) -> None:
    assert is_valid_name(name)


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a/b", "x" * 64, "é", "a\n", "[red]"])
def test_bad_names(name: str) -> None:
    assert not is_valid_name(name)


def test_ids_are_valid_names_and_differ() -> None:
    made = {make() for make in (new_node_id, new_job_id) for _ in range(100)}
    assert len(made) == 200
    assert all(is_valid_name(identity) for identity in made)


def error_classes() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DistensorError)
    }


def test_the_tree_at_the_top_of_the_file_is_the_real_one() -> None:
    """Each class stands in the drawing, one level below its base."""
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        found = re.search(r"([A-Z]\w+Error)", line)
        if found is None:
            continue
        depth, name = found.start(), found[1]
        while above and above[-1][0] >= depth:
            above.pop()
        drawn[name] = above[-1][1] if above else ""
        above.append((depth, name))
    real = {name: kind.__bases__[0].__name__ for name, kind in error_classes().items()}
    assert drawn == {**real, "DistensorError": ""}


def test_a_mistake_of_the_user_is_also_a_value_error() -> None:
    for name, kind in error_classes().items():
        assert issubclass(kind, ValueError) == issubclass(kind, errors.UserError), name


@pytest.mark.parametrize(("rank", "named"), [(-1, "driver"), (0, "rank 0"), (7, "rank 7")])
def test_a_lost_peer_is_named(rank: int, named: str) -> None:
    error = errors.PeerLostError(rank, "the cable")
    assert str(error) == f"lost peer {named}: the cable"
    assert error.rank == rank


@given(value=st.integers() | st.floats(allow_nan=False) | st.text(), default=st.integers())
def test_a_reading_is_its_value_or_the_default(value: object, default: int) -> None:
    assert value_or(value, default) == value  # type: ignore[arg-type]
    assert value_or(Unavailable(reason="no sensor"), default) == default


def test_not_available_is_false_and_says_why() -> None:
    assert not Unavailable(reason="no sensor")
    assert Unavailable(reason="no sensor") == Unavailable(reason="no sensor")
    assert "no sensor" in repr(Unavailable(reason="no sensor"))


def test_the_clock_of_the_machine() -> None:
    before = SYSTEM_CLOCK.monotonic()
    SYSTEM_CLOCK.sleep(0.001)
    asyncio.run(SYSTEM_CLOCK.sleep_async(0.001))
    assert SYSTEM_CLOCK.monotonic() - before >= 0.002
    assert SYSTEM_CLOCK.now() > 1.7e9
