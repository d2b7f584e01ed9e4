"""How `systemctl` and `launchctl` are asked: the only place of this package that starts a process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distensor.core.errors import ServiceError

NOT_FOUND = 127
LONGEST_S = 180.0
"""Stopping waits for the running round, which a unit allows 120 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a command said; `code` 127 means that there is no such command."""

    code: int
    text: str

    @property
    def ok(self) -> bool:
        return self.code == 0


class Runner(Protocol):
    """Runs a command to its end."""

    def __call__(self, *words: str) -> Outcome: ...


def run_command(*words: str) -> Outcome:
    """Standard output and error together; never asks anything of the terminal.

    Raises:
        ServiceError: it did not end within three minutes.
    """
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_S,
            check=False,
        )
    except FileNotFoundError:
        return Outcome(code=NOT_FOUND, text=f"{words[0]}: command not found")
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"`{' '.join(words)}` did not end within {LONGEST_S:.0f} s") from error
    return Outcome(code=done.returncode, text=done.stdout.decode(errors="replace").strip())


def demand(outcome: Outcome, words: Sequence[str], fix: str) -> Outcome:
    """The outcome, if the command succeeded.

    Raises:
        ServiceError: it did not; the message holds the command, what it said, and `fix`.
    """
    if not outcome.ok:
        said = outcome.text.splitlines()[-1] if outcome.text else "nothing"
        raise ServiceError(f"`{' '.join(words)}` ended with {outcome.code} and said: {said}\n  {fix}")
    return outcome
