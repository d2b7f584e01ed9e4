"""`distensor record FILE`: the supervisor's stream with its times, for `--replay`."""

from __future__ import annotations

import argparse
from pathlib import Path

from distensor_tui.answers import absent, fail, print_json
from distensor_tui.arguments import positive
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.exitcodes import ExitCode
from distensor_tui.once import NoSupervisor


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--seconds", type=positive, default=60.0, help="how long (default: %(default)s)")


def run(options: argparse.Namespace, path: Path) -> int:
    try:
        lines = _write(Path(options.file), path, options.seconds)
    except NoSupervisor as missing:
        return absent(missing.why, as_json=options.json)
    except OSError as error:
        message = f"cannot write {options.file}: {error.strerror}"
        return fail(options, "cannot_create", message, "give another FILE", ExitCode.CANNOT_CREATE)
    if options.json:
        print_json({"file": options.file, "lines": lines})
    return ExitCode.OK


def _write(file: Path, path: Path, seconds: float) -> int:
    from distensor_tui.recording import record as lines_of

    count = 0
    with file.open("w", encoding="utf-8") as opened:
        for row in lines_of(path, seconds, now=system_now, monotonic=system_monotonic):
            opened.write(row)
            opened.flush()
            count += 1
    return count
