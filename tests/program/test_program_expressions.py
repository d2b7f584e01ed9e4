"""Arithmetic of sizes: like Python's, bounded, and refusing everything else."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import ProgramRejectedError
from distensor.program.expressions import MAX_DEPTH, Size, check_tree, degree, evaluate, names, show, substitute

DIMS = {"batch": 6, "sequence": 10}


@pytest.mark.parametrize(
    ("tree", "value"),
    [
        ("batch", 6),
        (("+", "batch", "sequence", 1), 17),
        (("*", "batch", "sequence", -2), -120),
        (("//", "sequence", 4), 2),
        (("//", ("*", "sequence", -1), 4), -3),
        (("%", "sequence", 4), 2),
        (("/", "batch", 4), 1.5),
        (("max", "batch", "sequence", 7), 10),
        (("min", "batch", "sequence", 7), 6),
        (("sqrt", ("*", "batch", "batch")), 6.0),
        (("float", "batch"), 6.0),
        (("floor", ("/", "sequence", 4)), 2),
    ],
)
def test_evaluate(tree: Any, value: float) -> None:
    found = evaluate(Size(tree), DIMS)
    assert found == value
    assert type(found) is type(value)


def test_numbers_are_themselves() -> None:
    assert evaluate(5, {}) == 5
    assert list(names(5)) == []


@pytest.mark.parametrize("tree", [("//", "batch", 0), ("%", "batch", 0), ("/", 1, 0), ("sqrt", -1), ("*", 2**62, 4)])
def test_what_has_no_value_is_refused(tree: Any) -> None:
    with pytest.raises(ProgramRejectedError, match="size"):
        evaluate(Size(tree), DIMS)


@pytest.mark.parametrize(
    "tree",
    [
        "planet",
        None,
        True,
        [],
        ["+", "batch"],
        ["-", "batch", 1],
        ["**", "batch", 2],
        [["+"], 1, 2],
        ["sqrt", 1, 2],
        ["+", *[1] * 65],
        {"a": 1},
        2**63,
        1e300,
        ["+", "batch", ["eval", "1"]],
    ],
)
def test_foreign_trees_are_checked(tree: Any) -> None:
    with pytest.raises(ProgramRejectedError, match="size"):
        check_tree(tree, set(DIMS))


def test_depth_is_limited() -> None:
    tree: Any = "batch"
    for _ in range(MAX_DEPTH):
        tree = ["+", tree, 1]
    assert evaluate(Size(check_tree(tree, set(DIMS))), DIMS) == 6 + MAX_DEPTH
    with pytest.raises(ProgramRejectedError, match="nested deeper"):
        check_tree(["+", tree, 1], set(DIMS))


_TREES = st.recursive(
    st.one_of(st.sampled_from(sorted(DIMS)), st.integers(1, 9)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["+", "*", "max", "min"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 5)),
    ),
    max_leaves=8,
)


def _lists(tree: Any) -> Any:
    return [_lists(item) for item in tree] if isinstance(tree, tuple) else tree


@given(_TREES)
def test_a_tree_survives_its_json(tree: Any) -> None:
    assert check_tree(_lists(tree), set(DIMS)) == tree


@given(_TREES, st.integers(1, 50), st.integers(1, 50))
def test_degree_one_is_additive_over_a_split(tree: Any, one: int, other: int) -> None:
    size = Size(tree)
    if degree(size, "batch") != 1:
        return
    try:
        whole, first, second = (evaluate(size, {"batch": rows, "sequence": 10}) for rows in (one + other, one, other))
    except ProgramRejectedError:
        return
    assert math.isclose(whole, first + second)


def test_degree() -> None:
    assert degree(7, "batch") == 0
    assert degree(Size("batch"), "batch") == 1
    assert degree(Size(("*", "batch", "sequence", 3)), "batch") == 1
    assert degree(Size(("*", "batch", "batch")), "batch") == 2
    assert degree(Size(("+", "batch", 1)), "batch") is None
    assert degree(Size(("+", "batch", ("*", 2, "batch"))), "batch") == 1
    assert degree(Size(("//", "batch", 2)), "batch") is None
    assert degree(Size(("//", "sequence", 2)), "batch") == 0


def test_show_and_substitute() -> None:
    size = Size(("*", ("max", "batch", 2), "sequence"))
    assert show(size) == "(max(batch, 2) * sequence)"
    assert show(3) == "3"
    assert substitute(size, {"batch": "rows"}) == Size(("*", ("max", "rows", 2), "sequence"))
    assert substitute(3, {}) == 3
    assert sorted(names(size)) == ["batch", "sequence"]
