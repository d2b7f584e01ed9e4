"""The command `distensor-server`. Exit codes follow sysexits; a service manager need not restart on 77 and 78."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distensor import __version__
from distensor.core.errors import AuthenticationError, ConfigError, DistensorError, SessionError, StoreError
from distensor_server.config import (
    AUTO,
    DEFAULT_CPU_WORKERS,
    HOST_VARIABLE,
    Settings,
    default_name,
    default_socket_path,
    default_state_dir,
)
from distensor_server.keys.model import VARIABLE, FoundKey
from distensor_server.redact import redact_keys
from distensor_server.statedir import CREDENTIAL_FILE

if TYPE_CHECKING:
    from distensor_server.keys.chain import KeyStore


class ExitCode(IntEnum):
    OK = 0
    USAGE = 64
    UNAVAILABLE = 69
    INTERNAL = 70
    CANNOT_CREATE = 73
    TEMPORARY = 75
    NO_PERMISSION = 77
    BAD_CONFIG = 78


_EXIT_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (AuthenticationError, ExitCode.NO_PERMISSION),
    (ConfigError, ExitCode.BAD_CONFIG),
    (SessionError, ExitCode.TEMPORARY),
    (StoreError, ExitCode.CANNOT_CREATE),
    (DistensorError, ExitCode.INTERNAL),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse ends with 2; sysexits calls a wrong command line 64."""
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {redact_keys(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if sys.platform == "win32":
        print("distensor-server: Windows is not supported; use WSL 2", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    under_launchd = getattr(arguments, "launchd", False)
    _set_up_log(logging.ERROR if under_launchd else logging.INFO)
    code = _command_of(arguments)
    return code_for_launchd(code) if under_launchd else code


def _command_of(arguments: argparse.Namespace) -> int:
    """The command with every error made into its message and exit code."""
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except DistensorError as error:
        print(f"distensor-server: {error}", file=sys.stderr)
        return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))
    except Exception:  # noqa: BLE001 - the last line of the process: whatever it was, the service manager gets its code
        traceback.print_exc()
        return ExitCode.INTERNAL


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="distensor-server", description="Offers this machine's devices to a disTensor hub.")
    parser.add_argument("--version", action="version", version=f"distensor-server {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the supervisor until it is stopped")
    run.set_defaults(command=_run)
    run.add_argument("--state", type=Path, help="directory for identity, receipts and logs")
    run.add_argument("--socket", type=Path, help="where the dashboard connects (or DISTENSOR_SOCKET)")
    run.add_argument("--name", help="how this node is called (default: the host name)")
    run.add_argument(
        "--host",
        help=f"where workers listen and peers reach them; 0.0.0.0 and ::: everywhere (or {HOST_VARIABLE}; default: the "
        "address that leads to the hub)",
    )
    run.add_argument(
        "--advertise",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="another address at which peers reach the workers, such as a router's that forwards to them; repeatable",
    )
    run.add_argument("--cpu-workers", type=int, help=f"workers on the CPU (default: {DEFAULT_CPU_WORKERS})")
    run.add_argument("--drain-seconds", type=float, help="time to finish when stopped (default: 90)")
    run.add_argument("--config", type=Path, help="TOML file with cpu_workers and drain_seconds; SIGHUP reads it again")
    run.add_argument("--token-file", type=Path, help=f"file with this machine's key, mode 0600 (or {VARIABLE})")
    run.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input ends")
    run.add_argument("--launchd", action="store_true", help="run as an agent of launchd, see `distensor service`")
    run.add_argument("--json", action="store_true", help="say on standard output, as JSON lines, when it is up")
    devices = commands.add_parser("devices", help="show what this machine can offer, and why not")
    devices.set_defaults(command=_devices)
    devices.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _set_up_log(level: int) -> None:
    """Standard error gets `level` and above; the supervisor's own file (ownlog.py) has everything."""
    errors = logging.StreamHandler(sys.stderr)
    errors.setLevel(level)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, handlers=[errors])


def code_for_launchd(code: int) -> int:
    """launchd restarts whatever fails and knows no exceptions: what a restart cannot repair is 0 to it.

    Its log file is ours to keep small: it gets errors only, beside the rotated one of the supervisor.
    """
    if code not in {ExitCode.NO_PERMISSION, ExitCode.BAD_CONFIG}:
        return code
    print(f"distensor-server: exit {code} is told to launchd as 0: a restart would not repair it", file=sys.stderr)
    return ExitCode.OK


def _settings(arguments: argparse.Namespace) -> Settings:
    given = {"cpu_workers": arguments.cpu_workers, "drain_seconds": arguments.drain_seconds}
    return Settings(
        state_dir=(arguments.state or default_state_dir(os.environ)).absolute(),
        socket_path=(arguments.socket or default_socket_path(os.environ, sys.platform)).absolute(),
        name=arguments.name or default_name(),
        host=arguments.host or os.environ.get(HOST_VARIABLE) or AUTO,
        advertise=tuple(arguments.advertise),
        config_file=arguments.config,
        overrides={name: value for name, value in given.items() if value is not None},
    )


def _run(arguments: argparse.Namespace) -> int:
    # Here, so that `--help` and wrong options do not load what keys need.
    from distensor_server.keys.chain import KeyStore, config_dir, take_given
    from distensor_server.keys.login import read_key
    from distensor_server.keys.ring import KeyRing

    settings = _settings(arguments)
    given = take_given(arguments.token_file, os.environ)
    store = KeyStore(config_dir(os.environ, sys.platform), KeyRing(os.environ))
    found = given or store.find(registered=(settings.state_dir / CREDENTIAL_FILE).exists())
    if found is not None:
        # A key that was cut off while copying will never work: better said now than on every retry.
        read_key(found.key)
    asyncio.run(_supervise(settings, found, store, arguments))
    return ExitCode.OK


async def _supervise(
    settings: Settings, found: FoundKey | None, store: KeyStore, arguments: argparse.Namespace
) -> None:
    # Here, so that `--help` and wrong options do not load grpc.
    from distensor_server.hublink import link_with
    from distensor_server.keyfeature import KeyFeature
    from distensor_server.supervisor import FEATURES, StopMode, Supervisor

    supervisor = Supervisor(
        settings,
        make_link=link_with(None if found is None else found.key),
        features=(*FEATURES, partial(KeyFeature, found=found, store=store)),
        environment=os.environ,
        announce=_print_line if arguments.json else lambda _message: None,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop_by_signal, number.name)
    if os.isatty(0):  # somebody's window was closed: nobody would see or stop us any more
        loop.add_signal_handler(signal.SIGHUP, supervisor.stop_by_signal, "SIGHUP")
    else:
        loop.add_signal_handler(signal.SIGHUP, supervisor.reload)
    if arguments.exit_with_stdin:
        _watch_stdin(lambda: loop.call_soon_threadsafe(supervisor.stop, StopMode.NOW, "standard input ended"))
    await supervisor.run()


def _watch_stdin(on_end: Callable[[], object]) -> None:
    """A thread, because the loop cannot wait for a file or /dev/null."""

    def read() -> None:
        while os.read(0, 4096):
            pass
        on_end()

    threading.Thread(target=read, name="stdin", daemon=True).start()


def _print_line(message: Mapping[str, Any]) -> None:
    try:
        print(json.dumps({"v": 1, **message}), flush=True)
    except BrokenPipeError:
        # Whoever wanted to know is gone. Python would complain again at exit unless the stream is replaced.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it has to outlive this function


def _devices(arguments: argparse.Namespace) -> int:
    from distensor_server.devices.detect import Detector
    from distensor_server.devices.host import Host, cpu_device, cpu_name
    from distensor_server.devicesection import device_section

    sample = Host().sample()
    found = asyncio.run(Detector().accelerators(sample.memory))
    cpu = cpu_device(sample, slots=DEFAULT_CPU_WORKERS, name=cpu_name())
    devices = (*found, cpu)
    if arguments.json:
        rows = [device_section(device, (), frozenset()) for device in devices]
        print(json.dumps({"v": 1, "devices": rows}))
        return ExitCode.OK
    for device in devices:
        print(f"{device.device_id:<12} {device.name}: {device.unusable or 'can be used'}")
    return ExitCode.OK
