"""`distensor doctor`: every check with its finding, and the repair of what is wrong."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict

from distensor.core.clock import SYSTEM_CLOCK
from distensor_server.cli import ExitCode
from distensor_server.config import AUTO, HOST_VARIABLE
from distensor_server.doctor.checks import examine
from distensor_server.doctor.model import Finding, Level
from distensor_server.doctor.world import this_machine
from distensor_server.verbs.output import UsageError, fail, parser, places, say

_WORDS = {Level.OK: "ok", Level.WARNING: "WARNING", Level.FAIL: "FAIL"}


def main(arguments: Sequence[str]) -> int:
    """The entry point."""
    made = parser("doctor", "Checks this machine's set-up and says how to repair what is wrong.")
    host = os.environ.get(HOST_VARIABLE) or AUTO
    made.add_argument("--host", default=host, metavar="ADDRESS", help="the address of `distensor-server run`")
    try:
        options = made.parse_args(arguments)
    except UsageError as error:
        fix = "`distensor help doctor` shows examples"
        as_json = "--json" in arguments
        return fail(as_json=as_json, code="usage", message=str(error), fix=fix, exit_code=ExitCode.USAGE)
    where = places(options)
    world = this_machine(os.environ, state=where.state, socket_path=where.socket, host=options.host)
    findings = examine(world, SYSTEM_CLOCK.monotonic)
    healthy = not any(finding.level is Level.FAIL for finding in findings)
    say(options, {"ok": healthy, "checks": [asdict(finding) for finding in findings]}, as_text(findings))
    return ExitCode.OK if healthy else ExitCode.UNAVAILABLE


def as_text(findings: Sequence[Finding]) -> str:
    """One check a line, its repair below it, and the sum."""
    width = max((len(finding.check) for finding in findings), default=0)
    rows: list[str] = []
    for finding in findings:
        rows.append(f"{_WORDS[finding.level]:<8} {finding.check:<{width}}  {finding.finding}")
        rows += [f"{'':<9}{'':<{width}}  -> {finding.fix}"] if finding.fix else []
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    rows.append(f"{counts[Level.OK]} well, {counts[Level.WARNING]} warnings, {counts[Level.FAIL]} failed")
    return "\n".join(rows)
