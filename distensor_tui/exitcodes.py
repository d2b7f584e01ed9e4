"""How every command of `distensor` ends: one table, after sysexits, that the help and the documents print."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    USAGE = 64
    DATA_ERROR = 65
    NO_INPUT = 66
    UNAVAILABLE = 69
    INTERNAL = 70
    CANNOT_CREATE = 73
    TEMPORARY = 75
    PROTOCOL = 76
    NO_PERMISSION = 77
    BAD_CONFIG = 78
    INTERRUPTED = 130


MEANINGS: Mapping[ExitCode, str] = {
    ExitCode.OK: "done; also the status as text where no dashboard can be drawn",
    ExitCode.USAGE: "the command line is wrong: an unknown command, option or value",
    ExitCode.DATA_ERROR: "a file that was given is damaged (a recording, a key)",
    ExitCode.NO_INPUT: "a file that was given, or should come with this version, is not there",
    ExitCode.UNAVAILABLE: "no supervisor or hub answers, it refused, a check failed, or a wheel is missing",
    ExitCode.INTERNAL: "a fault of disTensor itself",
    ExitCode.CANNOT_CREATE: "a file, folder or socket cannot be made",
    ExitCode.TEMPORARY: "try again later: something else holds what is needed",
    ExitCode.PROTOCOL: "the other side speaks another version, or is no supervisor",
    ExitCode.NO_PERMISSION: "not yours to open, or a key that is refused; not restarted by a service",
    ExitCode.BAD_CONFIG: "a setting or path is wrong; not restarted by a service",
    ExitCode.INTERRUPTED: "ended by Ctrl-C",
}
