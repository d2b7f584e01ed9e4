"""All that is wrong in one message."""

from __future__ import annotations

import pytest

from distensor.core.errors import ConfigError, ShardingError
from distensor.core.problems import Problems, SeveralProblemsError, nearest_name


def refuse(text: str) -> int:
    raise ConfigError(text)


def test_nothing_wrong_is_no_error() -> None:
    problems = Problems()
    assert problems.check(int, "7") == 7
    problems.report()


def test_one_problem_is_the_error_that_it_is() -> None:
    problems = Problems()
    problems.add(ShardingError("a"))
    with pytest.raises(ShardingError, match=r"^a$"):
        problems.report()


def test_several_problems_are_numbered_and_nested_ones_are_taken_apart() -> None:
    inner = Problems()
    inner.check(refuse, "a")
    inner.check(refuse, "b")
    problems = Problems()
    problems.check(inner.report)
    assert problems.check(refuse, "c") is None
    with pytest.raises(SeveralProblemsError, match=r"3 problems(.|\n)*1\. a\n  2\. b\n  3\. c$") as caught:
        problems.report()
    assert len(caught.value.problems) == 3


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(ValueError):
        Problems().check(int, "x")


def test_the_nearest_name_is_offered() -> None:
    assert nearest_name("gpype", ["gpipe", "1f1b"]) == " (did you mean 'gpipe'?)"
    assert nearest_name("quite else", ["gpipe"]) == nearest_name(3, ["gpipe"]) == ""
