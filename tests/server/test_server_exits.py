from __future__ import annotations

import pytest

from distensor_server.exits import Evidence, ExitCause, name_exit

NOTHING = Evidence()


@pytest.mark.parametrize(
    ("code", "evidence", "cause", "reason"),
    [
        (0, NOTHING, ExitCause.DONE, "ended by itself (exit 0)"),
        (-9, NOTHING, ExitCause.SIGNAL, "killed by signal 9 (SIGKILL)"),
        (-11, NOTHING, ExitCause.SIGNAL, "killed by signal 11 (SIGSEGV)"),
        (-99, NOTHING, ExitCause.SIGNAL, "killed by signal 99 (signal 99)"),
        (137, NOTHING, ExitCause.OUT_OF_MEMORY, "out of memory (exit 137)"),
        (
            -9,
            Evidence(kernel_killed_for_memory=True),
            ExitCause.OUT_OF_MEMORY,
            "out of memory (killed by signal 9 (SIGKILL))",
        ),
        # Somebody's out-of-memory kill elsewhere says nothing about a crash of ours.
        (-11, Evidence(kernel_killed_for_memory=True), ExitCause.SIGNAL, "killed by signal 11 (SIGSEGV)"),
        (
            -9,
            Evidence(kernel_killed_for_memory=True, ended_by_us="was not ready within 180 s"),
            ExitCause.SIGNAL,
            "was not ready within 180 s; killed by signal 9 (SIGKILL)",
        ),
        (
            70,
            Evidence(told_code="out_of_memory", told_message="CUDA out of memory"),
            ExitCause.OUT_OF_MEMORY,
            "out of memory: CUDA out of memory (exit 70)",
        ),
        (1, Evidence(last_error_line="ValueError: x"), ExitCause.ERROR, "error: ValueError: x (exit 1)"),
        (
            70,
            Evidence(told_code="error", told_message="told", last_error_line="written"),
            ExitCause.ERROR,
            "error: told (exit 70)",
        ),
        (65, Evidence(told_message="op foo"), ExitCause.REFUSED_PROGRAM, "refused the program: op foo (exit 65)"),
        (69, Evidence(told_message="rank 1"), ExitCause.PEER_LOST, "lost a peer: rank 1 (exit 69)"),
        (
            1,
            Evidence(last_error_line="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."),
            ExitCause.OUT_OF_MEMORY,
            "out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. (exit 1)",
        ),
        (1, Evidence(last_error_line="MemoryError"), ExitCause.OUT_OF_MEMORY, "out of memory: MemoryError (exit 1)"),
        (
            70,
            Evidence(told_code="error", told_message="RuntimeError: MPS backend out of memory (MPS allocated: 5 GB)"),
            ExitCause.OUT_OF_MEMORY,
            "out of memory: RuntimeError: MPS backend out of memory (MPS allocated: 5 GB) (exit 70)",
        ),
        (
            -6,
            Evidence(last_error_line="what():  std::bad_alloc"),
            ExitCause.OUT_OF_MEMORY,
            "out of memory (killed by signal 6 (SIGABRT))",
        ),
        (-6, NOTHING, ExitCause.SIGNAL, "killed by signal 6 (SIGABRT)"),
        (64, NOTHING, ExitCause.BAD_ASSIGNMENT, "did not understand its assignment (exit 64)"),
        (77, NOTHING, ExitCause.HANDSHAKE_REFUSED, "handshake refused (exit 77)"),
    ],
)
def test_every_exit_has_a_cause_and_words(code: int, evidence: Evidence, cause: ExitCause, reason: str) -> None:
    ended = name_exit(code, evidence)
    assert (ended.cause, ended.reason) == (cause, reason)


def test_only_what_a_restart_can_change_is_restarted() -> None:
    final = {name_exit(code, NOTHING).cause for code in range(-64, 256) if name_exit(code, NOTHING).final}
    assert final == {
        ExitCause.DONE,
        ExitCause.REFUSED_PROGRAM,
        ExitCause.BAD_ASSIGNMENT,
        ExitCause.HANDSHAKE_REFUSED,
    }
