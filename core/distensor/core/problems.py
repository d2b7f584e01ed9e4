"""Collecting what is wrong with a declaration, so that one message names all of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from distensor.core.errors import ConfigError, UserError

P = ParamSpec("P")
T = TypeVar("T")


class SeveralProblemsError(ConfigError):
    """More than one thing is wrong; `problems` holds the errors that each alone would have been."""

    def __init__(self, problems: tuple[UserError, ...]) -> None:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
        super().__init__(f"{len(problems)} problems; nothing has been sent:\n{lines}")
        self.problems = problems


class Problems:
    """What checks have found so far.

    >>> problems = Problems()
    >>> problems.check(int, "7")
    7
    >>> problems.report()
    """

    def __init__(self) -> None:
        self._found: list[UserError] = []

    def check(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `function` returns; None, with the problem noted, where it raises a UserError."""
        try:
            return function(*args, **kwargs)
        except SeveralProblemsError as error:
            self._found.extend(error.problems)
        except UserError as error:
            self._found.append(error)
        return None

    def add(self, problem: UserError) -> None:
        self._found.append(problem)

    @property
    def found(self) -> tuple[UserError, ...]:
        return tuple(self._found)

    def report(self) -> None:
        """Raise what was found: one problem as the error that it is, several as SeveralProblemsError."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralProblemsError(self.found)


def nearest_name(value: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" where one of `known` is close to what was written, else nothing."""
    close = difflib.get_close_matches(value, list(known), n=1) if isinstance(value, str) else []
    return f" (did you mean {str(close[0])!r}?)" if close else ""
