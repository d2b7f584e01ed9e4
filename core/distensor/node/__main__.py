"""`python -m distensor.node`: obeys the supervisor on standard input. Not for people to start."""

from __future__ import annotations

import os
import sys
import traceback

from distensor.core import SYSTEM_CLOCK
from distensor.core.errors import (
    ConfigError,
    HandshakeError,
    ProgramRejectedError,
    TransportError,
)
from distensor.node.ipc import (
    Emitter,
    ExitCode,
    FailureCode,
    Mailbox,
    WorkerAssignment,
    claim_stdout,
    parse_assignment,
)
from distensor.node.lifeline import die_with_parent, follow_stdin
from distensor.node.pacer import Pacer


def main() -> int:
    die_with_parent()
    emitter = claim_stdout()
    pacer = Pacer(SYSTEM_CLOCK)
    mailbox = Mailbox(on_pace=pacer.obey)
    follow_stdin(sys.stdin, mailbox.deliver)
    try:
        assignment = parse_assignment(mailbox.take())
    except ConfigError as error:
        emitter.failed(FailureCode.ERROR, error)
        return ExitCode.BAD_ASSIGNMENT
    return _serve(emitter, mailbox, assignment, pacer)


def _serve(emitter: Emitter, mailbox: Mailbox, assignment: WorkerAssignment, pacer: Pacer) -> int:
    from distensor.node.aggregating import AggregatorRuntime
    from distensor.node.faults import FaultScript
    from distensor.node.no_compiler import put_off_the_compiler
    from distensor.node.runtime import WorkerRuntime
    from distensor.transport import Timeouts

    put_off_the_compiler()
    runtime: WorkerRuntime | AggregatorRuntime
    if assignment.rank >= assignment.parallel.world_size:
        runtime = AggregatorRuntime(
            assignment=assignment, mailbox=mailbox, emitter=emitter, clock=SYSTEM_CLOCK, timeouts=Timeouts()
        )
    else:
        runtime = WorkerRuntime(
            assignment=assignment,
            mailbox=mailbox,
            emitter=emitter,
            clock=SYSTEM_CLOCK,
            timeouts=Timeouts(),
            pacer=pacer,
            faults=FaultScript.of(os.environ),
        )
    try:
        runtime.run()
    except HandshakeError as error:
        emitter.failed(FailureCode.ERROR, error)
        return ExitCode.HANDSHAKE
    except TransportError as error:
        emitter.failed(FailureCode.PEER_LOST, error)
        return ExitCode.PEER_LOST
    except ProgramRejectedError as error:
        emitter.failed(FailureCode.REFUSED_PROGRAM, error)
        return ExitCode.REFUSED_PROGRAM
    except MemoryError as error:
        emitter.failed(FailureCode.OUT_OF_MEMORY, error)
        return ExitCode.INTERNAL
    except Exception as error:  # noqa: BLE001 - the last line of a process: name the error for the supervisor, then end
        traceback.print_exc()
        emitter.failed(FailureCode.ERROR, f"{type(error).__name__}: {error}")
        return ExitCode.INTERNAL
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
