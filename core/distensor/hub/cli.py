"""`distensor hub`: start a hub, or make another join token for one."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import platformdirs

from distensor.comm.address import HubAddress, address_argument, is_loopback, parse_address
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.commandline import UsageParser, stop_when_told
from distensor.core.errors import ConfigError, ControlError, DistensorError, StoreError, SupersededError
from distensor.hub import access_cli, money_cli, pay_cli
from distensor.hub.accounts import MAIN
from distensor.hub.app import HubConfig, Ready, run_hub
from distensor.hub.config_file import ConfiguredParser
from distensor.hub.machine import DEFAULT_PATIENCE
from distensor.hub.place import Place, place_of
from distensor.hub.state_directory import StateDirectory
from distensor.hub.status import status_of_hub
from distensor.hub.stores.address import PASSWORD_VARIABLE, DatabaseAddress, parse_database
from distensor.hub.stores.archives import open_archive
from distensor.hub.stores.backup import BackedUp, restore, write_backup
from distensor.hub.stores.opening import open_store
from distensor.hub.tokens import make_node_tokens

DEFAULT_LISTEN = "127.0.0.1:50051"
MOST_TOKENS = 1000
DATABASE_VARIABLE = "DISTENSOR_DATABASE"
LONGEST_WAIT = 7 * 86400.0


class Exit(IntEnum):
    """Exit statuses, as in sysexits.h."""

    OK = 0
    USAGE = 64
    UNAVAILABLE = 69
    SOFTWARE = 70
    CANNOT_CREATE = 73


def main(argv: list[str]) -> int:
    """Run the verb; the status for the shell."""
    return guarded("distensor hub", lambda: _run_verb(argv))


def guarded(prog: str, run: Callable[[], int]) -> int:
    """What `run` returns, or the status of the error that a hub ended with."""
    try:
        return run()
    except SystemExit as exit_:  # argparse ends this way, after --help too
        return int(exit_.code or 0)
    except ConfigError as error:
        return _fail(prog, error, Exit.USAGE)
    except StoreError as error:
        return _fail(prog, error, Exit.CANNOT_CREATE)
    except ControlError as error:
        return _fail(prog, error, Exit.UNAVAILABLE)
    except BaseExceptionGroup as group:  # a defect at work: the hub stops rather than break its promises
        if taken_over := _first_of(group, SupersededError):
            return _fail(prog, taken_over, Exit.UNAVAILABLE)
        traceback.print_exception(group)
        return Exit.SOFTWARE


def _run_verb(argv: list[str]) -> int:
    if argv[:1] == ["backup"]:
        return _backup(
            _copy_parser("backup", "Write the whole hub into one file; it may be running.").parse_args(argv[1:])
        )
    if argv[:1] == ["restore"]:
        return _restore(
            _copy_parser("restore", "Make the hub of a backup in a new state directory.").parse_args(argv[1:])
        )
    if argv[:1] == ["status"]:
        return _status(_status_parser().parse_args(argv[1:]))
    if argv[:1] == ["token"]:
        return _token(_token_parser().parse_args(argv[1:]))
    if argv[:1] == ["pay"]:
        return _pay(pay_cli.arguments(argv, _state_option))
    for desk in (access_cli, money_cli):
        if argv[:1] and argv[0] in desk.VERBS:
            return _desk(desk.arguments(argv, _state_option))
    return _hub(hub_parser().options(argv))


def _first_of(group: BaseExceptionGroup[BaseException], kind: type[DistensorError]) -> DistensorError | None:
    found = group.subgroup(kind)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]  # type: ignore[assignment]  # down to the first that is no group
    return found if isinstance(found, kind) else None


def _fail(prog: str, error: DistensorError, status: Exit) -> int:
    print(f"{prog}: {error}", file=sys.stderr)
    return status


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 to {MOST_TOKENS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= LONGEST_WAIT:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds from 1 to {LONGEST_WAIT:.0f}")
    return seconds


def _relay_address(text: str) -> str:
    return str(_hub_address(text))


def _hub_address(text: str) -> HubAddress:
    try:
        return parse_address(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _state_option(parser: argparse.ArgumentParser) -> None:
    default = Path(platformdirs.user_state_dir("distensor")) / "hub"
    parser.add_argument(
        "--state", type=Path, default=default, metavar="DIR", help=f"where the hub keeps its books ({default})"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    _database_options(parser)


def _database_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--database",
        default=os.environ.get(DATABASE_VARIABLE),
        metavar="URL",
        help="keep the books in PostgreSQL: postgresql://user@host:port/name, without the password "
        f"(${DATABASE_VARIABLE}; default: a file in the state directory)",
    )
    parser.add_argument(
        "--database-password-file",
        type=Path,
        metavar="FILE",
        help=f"a file with the password of the database (default: ${PASSWORD_VARIABLE})",
    )


def _database(options: argparse.Namespace) -> DatabaseAddress | None:
    if not options.database:
        return None
    return parse_database(options.database, os.environ, options.database_password_file)


def hub_parser() -> ConfiguredParser:
    parser = ConfiguredParser(
        prog="distensor hub",
        description="Run a hub: it knows the nodes, places jobs on them and keeps the books.",
        epilog="`distensor hub token` makes another join token for a node, `hub status` says how the hub is, `hub "
        "backup FILE` and `hub restore FILE` keep and bring back all of it; `hub account`, `hub key`, `hub audit` and "
        "`hub deposit` and its like are for a hub of several people.",
    )
    hub_options(parser)
    return parser


def hub_options(parser: ConfiguredParser) -> None:
    """The options of whatever runs a hub; `config_of` reads them."""
    parser.add_config()
    _state_option(parser)
    parser.add_argument(
        "--listen",
        type=address_argument,
        default=parse_address(DEFAULT_LISTEN),
        metavar="HOST:PORT",
        help=f"where to accept connections ({DEFAULT_LISTEN}; port 0 takes a free one)",
    )
    parser.add_argument(
        "--other-hub",
        type=_hub_address,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="where another hub on the same database is, which tokens name beside this one; may be repeated",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait while another hub serves on the database (see --database), and take its place when it is gone",
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="the host name or address by which nodes reach this machine"
    )
    parser.add_argument(
        "--relay",
        type=_relay_address,
        metavar="HOST:PORT",
        help="tell the members of jobs of this relay (see `distensor relay`), for those who cannot reach each other",
    )
    parser.add_argument(
        "--node-tokens", type=_count, metavar="N", help="make N join tokens for nodes (1 when there is no node yet)"
    )
    parser.add_argument(
        "--trainer-gone",
        type=_seconds,
        default=DEFAULT_PATIENCE.trainer_gone,
        metavar="SECONDS",
        help="how long workers wait, with what they hold, for a trainer that has vanished "
        f"({DEFAULT_PATIENCE.trainer_gone:.0f})",
    )
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end when standard input does (for programs that start a hub)"
    )


def _token_parser() -> argparse.ArgumentParser:
    parser = UsageParser(prog="distensor hub token", description="Make join tokens for nodes; the hub may be running.")
    _state_option(parser)
    parser.add_argument("--count", type=_count, default=1, metavar="N", help="how many (1)")
    parser.add_argument("--account", default=MAIN, metavar="NAME", help=f"whose nodes they make ({MAIN})")
    return parser


def _status_parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="distensor hub status",
        description="Whether the hub of this state directory serves, and what it has. Ends with 69 where it does not.",
    )
    _state_option(parser)
    return parser


def _copy_parser(verb: str, description: str) -> argparse.ArgumentParser:
    parser = UsageParser(prog=f"distensor hub {verb}", description=description)
    _state_option(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="the backup; whoever has it can be this hub")
    return parser


def _backup(options: argparse.Namespace) -> int:
    database = _database(options) or StateDirectory(options.state).database
    if isinstance(database, Path) and not database.exists():
        raise StoreError(f"state directory {options.state}: no hub has been started on it yet")
    with closing(open_archive(database)) as archive:
        done = write_backup(archive, options.state, options.file)
    return _told(options, "backup", done)


def _restore(options: argparse.Namespace) -> int:
    database = _database(options) or StateDirectory(options.state).database
    done = restore(options.file, options.state, lambda: open_archive(database))
    return _told(options, "restored", done)


def _told(options: argparse.Namespace, word: str, done: BackedUp) -> int:
    if options.json:
        print(json.dumps({"v": 1, "files": done.files, "tables": done.tables, "rows": done.rows}))
    else:
        print(f"{word}: {done.rows} rows of {done.tables} tables, {done.files} files, in {options.file}")
    return Exit.OK


def _token(options: argparse.Namespace) -> int:
    tokens = make_node_tokens(options.state, options.count, SYSTEM_CLOCK, _database(options), account=options.account)
    if options.json:
        print(json.dumps({"v": 1, "node_tokens": tokens}))
    else:
        print("\n".join(tokens))
    return Exit.OK


def _status(options: argparse.Namespace) -> int:
    directory = StateDirectory(options.state)
    status = status_of_hub(directory, _place(directory), _database(options) or directory.database)
    print(json.dumps(status.values()) if options.json else status)
    return Exit.UNAVAILABLE if status.trouble else Exit.OK


def _place(directory: StateDirectory) -> Place:
    place = place_of(directory)
    if place is None:
        raise StoreError(f"state directory {directory.path}: no hub has been started on it yet")
    return place


def _desk(options: argparse.Namespace) -> int:
    """A command of the operator's, in one transaction; what it prints is true by then."""
    directory = StateDirectory(options.state)
    place = _place(directory)
    store = open_store(_database(options) or directory.database)
    with closing(store), store.transaction() as books:
        now = int(SYSTEM_CLOCK.now())
        text = access_cli.execute(access_cli.Desk(books=books, options=options, now=now, place=place))
    print(text)
    return Exit.OK


def _pay(options: argparse.Namespace) -> int:
    directory = StateDirectory(options.state)
    _place(directory)
    pay_cli.run(options, lambda: open_store(_database(options) or directory.database), SYSTEM_CLOCK, os.environ)
    return Exit.OK


def config_of(options: argparse.Namespace) -> HubConfig:
    """Raises: ConfigError: the database is not one, its password cannot be read, or options contradict each other."""
    database = _database(options)
    if options.standby and database is None:
        raise ConfigError("--standby: hubs take each other's place on a database that both reach; add --database")
    if options.other_hub and not options.listen.port:
        raise ConfigError(f"--other-hub: tokens name this hub too, so --listen {options.listen} needs a fixed port")
    return HubConfig(
        state=options.state,
        listen=options.listen,
        database=database,
        other_hubs=tuple(options.other_hub),
        standby=options.standby,
        advertise=options.advertise,
        node_tokens=options.node_tokens,
        relay=options.relay or "",
        patience=replace(DEFAULT_PATIENCE, trainer_gone=options.trainer_gone),
    )


def _hub(options: argparse.Namespace) -> int:
    config = config_of(options)
    asyncio.run(_run(config, as_json=options.json, exit_with_stdin=options.exit_with_stdin))
    return Exit.OK


async def _run(config: HubConfig, *, as_json: bool, exit_with_stdin: bool) -> None:
    stop = asyncio.Event()
    stop_when_told(stop, with_stdin=exit_with_stdin)

    def on_ready(ready: Ready) -> None:
        print(json.dumps(ready_values(ready)) if as_json else ready_text(ready), flush=True)

    await run_hub(config, clock=SYSTEM_CLOCK, on_ready=on_ready, log=_log, stop=stop)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ready_values(ready: Ready) -> dict[str, object]:
    """For `--json`."""
    return {
        "v": 1,
        "event": "ready",
        "address": str(ready.address),
        "node_tokens": list(ready.node_tokens),
        "trainer_token": ready.trainer_token,
        "generation": ready.generation,
        "authority_fingerprint": ready.fingerprint,
    }


def ready_text(ready: Ready) -> str:
    """For people, with the secrets that they need."""
    parts = [f"disTensor hub at {ready.address}, authority {ready.fingerprint[:16]}, start {ready.generation}"]
    if is_loopback(ready.address.host):
        parts.append("Only programs on this machine reach it; for others add --listen 0.0.0.0:50051.")
    elif not ready.relay:
        parts.append(
            "Where machines cannot reach each other a relay joins them: on one that all reach,\n"
            f"  distensor relay --listen 0.0.0.0:50052 --hub {ready.address} --authority {ready.fingerprint}\n"
            "and this hub started again with --relay HOST:50052 added."
        )
    if ready.known_nodes:
        parts.append(f"It knows {ready.known_nodes} nodes and {ready.live_jobs} live jobs; they continue.")
    if ready.node_tokens:
        # Alone on its line, so that it can be copied with one click.
        title = "Key for a machine that shall work" + (" (one for each)" if len(ready.node_tokens) > 1 else "")
        parts.append(
            "\n".join([f"{title}, used once:", *ready.node_tokens])
            + "\nGive it to the installer, to the dashboard (a), to `distensor auth login`, or start by hand with\n"
            "  DISTENSOR_API_KEY=dtj_... distensor-server run"
        )
    else:
        parts.append("Another machine: `distensor hub token` makes a key for it.")
    parts.append(
        f"Token for trainers:\n{ready.trainer_token}\n"
        'Your script says ds.init(mode="hub") and is started with DISTENSOR_TOKEN set to it.\n\n'
        "Both are secrets: whoever has one can join. Ctrl-C ends the hub; workers go on meanwhile."
    )
    return "\n\n".join(parts)
