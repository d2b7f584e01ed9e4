"""Why a worker ended, in words, and whether it may come back."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum


class ExitCause(StrEnum):
    DONE = "done"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"
    PEER_LOST = "peer_lost"
    REFUSED_PROGRAM = "refused_program"
    BAD_ASSIGNMENT = "bad_assignment"
    HANDSHAKE_REFUSED = "handshake_refused"
    NOT_STARTED = "not_started"


FINAL = frozenset(
    {
        ExitCause.DONE,
        ExitCause.REFUSED_PROGRAM,
        ExitCause.BAD_ASSIGNMENT,
        ExitCause.HANDSHAKE_REFUSED,
    }
)
"""Causes that a restart cannot change: the same assignment would meet the same answer."""

KILLED_BY_SHELL = 128 + signal.SIGKILL
"""137: what a container runtime or a shell reports for a process that got SIGKILL, nearly always for memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """One end of a worker process."""

    cause: ExitCause
    reason: str

    @property
    def final(self) -> bool:
        return self.cause in FINAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What else is known about an exit, besides its code."""

    told_code: str = ""
    """The code of the worker's own `failed` message."""
    told_message: str = ""
    last_error_line: str = ""
    """The last line on its stderr: for a Python traceback the line that names the exception."""
    kernel_killed_for_memory: bool = False
    """The kernel's count of out-of-memory kills rose while this worker ran."""
    ended_by_us: str = ""
    """Why the supervisor itself killed it; empty when it did not."""


_BY_CODE: dict[int, tuple[ExitCause, str]] = {
    64: (ExitCause.BAD_ASSIGNMENT, "did not understand its assignment"),
    65: (ExitCause.REFUSED_PROGRAM, "refused the program"),
    69: (ExitCause.PEER_LOST, "lost a peer"),
    77: (ExitCause.HANDSHAKE_REFUSED, "handshake refused"),
}

_BY_TOLD: dict[str, tuple[ExitCause, str]] = {
    "peer_lost": (ExitCause.PEER_LOST, "lost a peer"),
    "refused_program": (ExitCause.REFUSED_PROGRAM, "refused the program"),
    "out_of_memory": (ExitCause.OUT_OF_MEMORY, "out of memory"),
}


_MEMORY_WORDS = re.compile(
    r"OutOfMemoryError|out of memory|^MemoryError\b|std::bad_alloc|(can't|cannot|failed to) allocate|not enough memory",
    re.IGNORECASE,
)
"""How torch (CUDA, MPS, CPU), Python and C++ say in their last line that memory ran out."""


def name_exit(code: int, evidence: Evidence) -> Exit:
    """The cause and the words for exit status `code` (negative: ended by that signal, as in `subprocess`)."""
    if code < 0:
        return _by_signal(-code, evidence)
    if code == KILLED_BY_SHELL:
        return Exit(cause=ExitCause.OUT_OF_MEMORY, reason="out of memory (exit 137)")
    if code == 0:
        return Exit(cause=ExitCause.DONE, reason="ended by itself (exit 0)")
    known = _BY_CODE.get(code) or _BY_TOLD.get(evidence.told_code)
    if known is not None:
        cause, words = known
        return Exit(cause=cause, reason=_with_detail(words, evidence.told_message, code))
    detail = evidence.told_message or evidence.last_error_line
    if _MEMORY_WORDS.search(detail):
        return Exit(cause=ExitCause.OUT_OF_MEMORY, reason=_with_detail("out of memory", detail, code))
    return Exit(cause=ExitCause.ERROR, reason=_with_detail("error", detail, code))


def _by_signal(number: int, evidence: Evidence) -> Exit:
    words = f"killed by signal {number} ({signal_name(number)})"
    if evidence.ended_by_us:
        return Exit(cause=ExitCause.SIGNAL, reason=f"{evidence.ended_by_us}; {words}")
    aborted = number == signal.SIGABRT and bool(_MEMORY_WORDS.search(evidence.last_error_line))
    told_memory = evidence.told_code == "out_of_memory" or aborted
    if told_memory or (number == signal.SIGKILL and evidence.kernel_killed_for_memory):
        return Exit(cause=ExitCause.OUT_OF_MEMORY, reason=f"out of memory ({words})")
    return Exit(cause=ExitCause.SIGNAL, reason=words)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_detail(words: str, detail: str, code: int) -> str:
    return f"{words}: {detail} (exit {code})" if detail else f"{words} (exit {code})"
