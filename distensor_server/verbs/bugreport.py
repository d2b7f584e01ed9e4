"""`distensor bugreport`: a file for somebody who helps, without secrets. Its contents are listed; nothing is sent."""

from __future__ import annotations

import argparse
import getpass
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from distensor.comm.address import without_user
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import StoreError
from distensor.core.reading import Unavailable
from distensor_server.bugreport import SETTING_NAMES, gather, pack
from distensor_server.cli import ExitCode
from distensor_server.doctor.checks import examine
from distensor_server.doctor.model import World
from distensor_server.doctor.world import this_machine
from distensor_server.environment import NAMES, PREFIXES
from distensor_server.keys.chain import config_dir
from distensor_server.redact import Redactor, is_secret_name
from distensor_server.statedir import read_json
from distensor_server.verbs.output import Places, UsageError, fail, parser, places, say, write

OUR_PREFIXES = (*PREFIXES, "DISTENSOR_", "XDG_", "CUDA_", "NVIDIA_", "PYTORCH_")
NO_PROXY = "no_proxy"
PROXY_ENDING = "_proxy"


def main(arguments: Sequence[str]) -> int:
    """The entry point."""
    made = parser("bugreport", "Packs versions, settings, checks and logs without secrets; nothing is sent.")
    made.add_argument("--output", type=Path, metavar="FILE", help="default: distensor-bugreport-TIME.tar.gz here")
    made.add_argument("--config", type=Path, metavar="FILE", help="the configuration file of `distensor-server run`")
    made.add_argument("--hide-addresses", action="store_true", help="take out network addresses too")
    try:
        options = made.parse_args(arguments)
    except UsageError as error:
        fix = "`distensor help bugreport` shows examples"
        as_json = "--json" in arguments
        return fail(as_json=as_json, code="usage", message=str(error), fix=fix, exit_code=ExitCode.USAGE)
    return _report(options, places(options))


def _report(options: argparse.Namespace, where: Places) -> int:
    now = SYSTEM_CLOCK.now()
    world = this_machine(os.environ, state=where.state, socket_path=where.socket, host="127.0.0.1")
    config = config_dir(os.environ, sys.platform)
    settings = [path for pattern in SETTING_NAMES for path in sorted(config.glob(pattern))]
    entries = gather(
        _redactor(world, os.environ, hide_addresses=options.hide_addresses),
        facts=_facts(world),
        environment=_shown(os.environ),
        checks=[asdict(finding) for finding in examine(world, SYSTEM_CLOCK.monotonic)],
        sections=_sections(world),
        settings=[*settings, *([options.config] if options.config else [])],
        state=where.state,
    )
    path = options.output or Path(f"distensor-bugreport-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}.tar.gz")
    rows = [f"{len(entry.content):>9,} bytes  {entry.name:<28} {entry.about}" for entry in entries]
    if not options.json:
        write(sys.stdout, "\n".join(["This goes into the report:", *rows]))
    try:
        pack(entries, path, at=now)
    except StoreError as error:
        fix = "give another file by --output"
        return fail(
            as_json=options.json, code="not_kept", message=str(error), fix=fix, exit_code=ExitCode.CANNOT_CREATE
        )
    files = [{"name": entry.name, "bytes": len(entry.content), "about": entry.about} for entry in entries]
    text = f"written: {path}\n  nothing was sent; look into it before you hand it on: tar -xzf {path}"
    say(options, {"ok": True, "file": str(path), "contents": files}, text)
    return ExitCode.OK


def _redactor(world: World, environment: Mapping[str, str], *, hide_addresses: bool) -> Redactor:
    """The key itself and every variable of a secret name are taken out wherever they stand."""
    known = [value for name, value in environment.items() if is_secret_name(name) and not value.startswith("/")]
    known += [part for name, value in environment.items() if _is_proxy(name) for part in _user_parts(value)]
    if world.key is not None:
        known.append(world.key.key)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    home = environment.get("HOME", "")
    return Redactor(home=home, user=user, known=tuple(known), hide_addresses=hide_addresses)


def _shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter to us; others may hold anything."""
    proxies = {name: without_user(value) for name, value in environment.items() if _is_proxy(name)}
    ours = {
        name: value
        for name, value in environment.items()
        if name in NAMES or name.lower() == NO_PROXY or name.startswith(OUR_PREFIXES)
    }
    return ours | proxies


def _is_proxy(name: str) -> bool:
    """Programs obey many of them, in both cases: http_proxy, HTTPS_PROXY, all_proxy, pip_proxy ..."""
    return name.lower().endswith(PROXY_ENDING) and name.lower() != NO_PROXY


def _user_parts(url: str) -> list[str]:
    """'ann:pw' and 'pw' of 'http://ann:pw@proxy'; the password as it is and as it is meant (%40 is @)."""
    user = url.rpartition("@")[0].rpartition("://")[2]
    password = user.partition(":")[2]
    return [part for part in (user, password, unquote(password)) if part]


def _facts(world: World) -> dict[str, Any]:
    return {
        "wheels": dict(world.wheels),
        "python": sys.version,
        "system": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def _sections(world: World) -> dict[str, Any]:
    """From the running supervisor, else the last ones that it kept."""
    found = world.look()
    if not isinstance(found, Unavailable):
        return {"live": True, "hello": dict(found.hello), "data": dict(found.sections)}
    return {"live": False, "reason": found.reason, "last": read_json(world.state / "snapshot.json")}
