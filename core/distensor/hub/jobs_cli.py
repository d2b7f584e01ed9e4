"""`distensor jobs list|show|explain|cost|cancel`: the jobs of an account, asked of their hub.

Which hub, and as whom, says the token in DISTENSOR_TOKEN; without one it is the hub whose state is on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import platformdirs

from distensor.comm.client import HubClient
from distensor.comm.tokens import Role
from distensor.core.commandline import Exit, UsageParser, status_of
from distensor.core.control import JobState
from distensor.core.errors import ConfigError, HubProtocolError, NotAllowedError
from distensor.core.ids import JobId, is_valid_name
from distensor.core.job_report import JobQuery, JobSummary, jobs_table
from distensor.hub.place import place_of
from distensor.hub.state_directory import StateDirectory

TOKEN = "DISTENSOR_TOKEN"  # noqa: S105  # the name of a variable


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    return status_of("distensor jobs", lambda: _jobs(_parser().parse_args(argv)))


def _jobs(options: argparse.Namespace) -> int:
    with HubClient(_token(options.state)) as client:
        print(options.run(client, options))
    return Exit.OK


def _parser() -> argparse.ArgumentParser:
    top = UsageParser(prog="distensor jobs", description="Jobs of an account, asked of their hub.")
    commands = top.add_subparsers(required=True, metavar="list|show|explain|cancel")
    listing = _command(commands, "list", "Show the jobs that wait, start or run.", _list)
    listing.add_argument("--ended", action="store_true", help="also those that have ended")
    for name, about, run in (
        ("show", "Show the state of a job and of its workers.", _explain),
        ("explain", "Say why each rank is where it is, why other nodes have none, and what is missing.", _explain),
        ("cost", "What a job was quoted, what it has cost so far, and what went back.", _cost),
        ("cancel", "End a job.", _cancel),
    ):
        command = _command(commands, name, about, run)
        command.add_argument("job", type=_job, help="its id, as `distensor jobs list` shows it")
        if name == "cancel":
            command.add_argument("--reason", default="cancelled from the command line", help="for those who ask later")
    return top


def _command(commands: Any, name: str, about: str, run: Callable[..., str]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    default = Path(platformdirs.user_state_dir("distensor")) / "hub"
    command.add_argument(
        "--state",
        type=Path,
        default=default,
        metavar="DIR",
        help=f"of a hub here, where {TOKEN} is not set ({default})",
    )
    command.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    command.set_defaults(run=run)
    return command


def _job(text: str) -> JobId:
    if not is_valid_name(text):
        raise argparse.ArgumentTypeError(f"{text[:70]!r}: expected the id of a job")
    return JobId(text)


def _token(state: Path) -> str:
    """Raises: ConfigError: neither a token nor a hub on this machine."""
    if text := os.environ.get(TOKEN):
        return text
    directory = StateDirectory(state)
    place = place_of(directory)
    if place is None:
        raise ConfigError(
            f"which hub? Set {TOKEN} to a trainer's or an admin's token; there is no hub's state in {state} either"
        )
    secret = directory.trainer_secret()
    return place.token(Role.TRAINER, secret)


def _list(client: HubClient, options: argparse.Namespace) -> str:
    jobs = tuple(_all(client, ended=options.ended))
    if options.json:
        return json.dumps({"v": 1, "jobs": [_values(job) for job in jobs]})
    return jobs_table(jobs) if jobs else "No jobs."


def _all(client: HubClient, *, ended: bool) -> Iterator[JobSummary]:
    query = JobQuery(ended=ended)
    while True:
        page = client.list_jobs(query)
        yield from page.jobs
        if not page.more or not page.jobs:
            return
        query = JobQuery(ended=ended, after=page.jobs[-1].job_id)


def _explain(client: HubClient, options: argparse.Namespace) -> str:
    report = client.explain_job(options.job)
    if not options.json:
        return str(report)
    values = {
        "job": _values(report.job),
        "ranks": [asdict(one) for one in report.ranks],
        "passed": [asdict(one) for one in report.passed],
        "missing": report.missing,
        "cost": None if report.cost is None else asdict(report.cost),
    }
    return json.dumps({"v": 1, **values})


def _cost(client: HubClient, options: argparse.Namespace) -> str:
    cost = client.explain_job(options.job).cost
    if cost is None:
        raise HubProtocolError(f"the hub did not say what job {options.job} costs: it is of an older version")
    return json.dumps({"v": 1, "cost": asdict(cost)}) if options.json else str(cost)


def _cancel(client: HubClient, options: argparse.Namespace) -> str:
    """The hub leaves a job alone that has ended, so what it is afterwards may be something else."""
    client.end_job(options.job, JobState.CANCELLED, options.reason)
    try:
        state = client.explain_job(options.job).job.state
    except NotAllowedError:  # a key that may end jobs and not read them
        return json.dumps({"v": 1, "job": options.job}) if options.json else f"Job {options.job} has ended."
    if options.json:
        return json.dumps({"v": 1, "job": options.job, "state": state.value})
    if state is not JobState.CANCELLED:
        return f"Job {options.job} had ended already: it is {state.value}."
    return f"Job {options.job} is cancelled."


def _values(job: JobSummary) -> dict[str, Any]:
    return {**asdict(job), "workers": job.workers}
