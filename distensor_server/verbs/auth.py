"""`distensor auth login|status|logout`: this machine's key."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distensor.core.errors import ConfigError, DistensorError, ServiceError
from distensor_server.cli import ExitCode
from distensor_server.keyfeature import refusal
from distensor_server.keys.chain import KeyStore, config_dir, take_given
from distensor_server.keys.identity import bring_back, set_aside
from distensor_server.keys.login import log_in
from distensor_server.keys.ring import KeyRing
from distensor_server.localclient import NoAnswerError, ask, look
from distensor_server.localserver import RequestError
from distensor_server.statedir import CREDENTIAL_FILE
from distensor_server.verbs.output import Parser, UsageError, common, done, fail, only_the_systems, parser, places

if TYPE_CHECKING:
    from distensor_server.verbs.systemkey import SystemKey

LONGEST = 4096
_EXITS = {
    "hub_unreachable": ExitCode.UNAVAILABLE,
    "not_a_hub": ExitCode.UNAVAILABLE,
    "not_kept": ExitCode.CANNOT_CREATE,
}
IN_ARGV = "a key on the command line can be read by every user of this machine, and stays in the shell's history"


class _Answer(Exception):  # noqa: N818 - an answer that ends the command, not a defect
    def __init__(self, code: str, message: str, fix: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.code, self.fix, self.exit_code = code, fix, exit_code


def main(arguments: Sequence[str]) -> int:
    """The entry point."""
    as_json = "--json" in arguments
    try:
        options = _parser().parse_args(arguments)
        if not (options.socket or options.state):
            options.system = options.system or only_the_systems()
        act: Callable[[argparse.Namespace], int] = options.act
        return act(options)
    except UsageError as error:
        fix = "`distensor help auth` shows examples"
        return fail(as_json=as_json, code="usage", message=str(error), fix=fix, exit_code=ExitCode.USAGE)
    except _Answer as answer:
        return fail(as_json=as_json, code=answer.code, message=str(answer), fix=answer.fix, exit_code=answer.exit_code)
    except RequestError as error:
        exit_code = _EXITS.get(error.code, ExitCode.NO_PERMISSION)
        return fail(as_json=as_json, code=error.code, message=error.message, fix=error.fix, exit_code=exit_code)


def _parser() -> Parser:
    made = parser("auth", "This machine's key for its hub.")
    actions = made.add_subparsers(required=True, metavar="login|status|logout")
    login = actions.add_parser("login", help="ask for the key, test it with its hub, keep it")
    login.add_argument("--stdin", action="store_true", help="read the key from standard input")
    login.add_argument("--no-test", action="store_true", help="keep it without asking the hub")
    login.add_argument("--in-file", action="store_true", help="keep it in a file of mode 0600, not in the keyring")
    login.add_argument("argv_key", nargs="*", help=argparse.SUPPRESS)
    login.set_defaults(act=_login)
    actions.add_parser("status", help="which key is used, and from where").set_defaults(act=_status)
    actions.add_parser("logout", help="forget the key").set_defaults(act=_logout)
    for each in actions.choices.values():
        common(each, nested=True)
        each.add_argument("--system", action="store_true", help="of the whole machine's service (Linux, root)")
    return made


def _system_key(options: argparse.Namespace) -> SystemKey:
    # Here, because only few installations are of this kind.
    from distensor_server.service.cli import chosen_layout, chosen_manager
    from distensor_server.service.runner import run_command
    from distensor_server.verbs.systemkey import SystemKey

    layout = chosen_layout(os.environ, sys.platform, run_command, system=True)
    manager = chosen_manager(layout, sys.platform, run_command)
    say = (lambda _line: None) if options.json else print
    return SystemKey(layout=layout, manager=manager, uid=os.geteuid(), say=say)


def _of_the_system(act: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return act()
    except (ServiceError, ConfigError) as error:
        fix = "`distensor service status --system` says more"
        raise _Answer("service", str(error), fix, ExitCode.UNAVAILABLE) from error
    except DistensorError as error:
        raise refusal(error) from error


def _store() -> KeyStore:
    return KeyStore(config_dir(os.environ, sys.platform), KeyRing(os.environ))


# login


def _login(options: argparse.Namespace) -> int:
    if options.argv_key:
        fix = "run `distensor auth login` and paste it, or give it by standard input with --stdin; make a new key"
        raise _Answer("key_in_argv", IN_ARGV, fix, ExitCode.USAGE)
    key = _read_key(from_stdin=options.stdin)
    result: Mapping[str, Any]
    if options.system:
        result = _of_the_system(lambda: _system_key(options).log_in(key, test=not options.no_test))
        return done(options, result, _login_text(result))
    params = {"key": key, "test": not options.no_test, "in_file": options.in_file}
    socket, state = places(options).socket, places(options).state
    try:
        result = {**ask(socket, "auth_login", params), "supervisor": "running"}
    except NoAnswerError as nobody:
        if nobody.code != "not_running":
            fix = "run this as the user of the supervisor; `distensor doctor` looks closer"
            raise _Answer(nobody.code, str(nobody), fix, ExitCode.UNAVAILABLE) from nobody
        result = {**_log_in_alone(params, state / CREDENTIAL_FILE), "supervisor": "not running"}
    return done(options, result, _login_text(result))


_AFTER = {
    "running": "the running supervisor uses it now",
    "restarted": "the service runs with it now",
    "not installed": "there is no service of the machine yet: sudo distensor service install --system",
}


def _login_text(result: Mapping[str, Any]) -> str:
    text = f"kept in {result['where']}, for the hub at {result['hub']}"
    tested = "the hub knows this key" if result["tested"] else "the hub was not asked"
    return f"{tested}; {text}\n  {_AFTER.get(result['supervisor'], 'start: distensor-server run')}"


def _read_key(*, from_stdin: bool) -> str:
    """From a terminal without echo, or from standard input. Never from argv."""
    if from_stdin:
        text = sys.stdin.read(LONGEST)
    elif sys.stdin.isatty():
        text = getpass.getpass("Key (dtj_..., not shown): ")
    else:
        fix = "in a script: distensor auth login --stdin < FILE"
        raise _Answer("no_terminal", "there is no terminal to ask for the key", fix, ExitCode.USAGE)
    if not text.strip():
        raise _Answer("no_key", "no key was given", "paste the line dtj_... that the hub printed", ExitCode.USAGE)
    return text.strip()


def _log_in_alone(params: Mapping[str, Any], credential: Path) -> dict[str, Any]:
    try:
        login = asyncio.run(log_in(params["key"], _store(), test=params["test"], in_file=params["in_file"]))
    except DistensorError as error:
        raise refusal(error) from error
    bring_back(credential, login.fingerprint)
    kept = login.kept
    where = {"source": kept.source.value, "where": kept.where, "key": kept.masked}
    return {**where, "hub": login.hub, "tested": login.tested}


# status


def _status(options: argparse.Namespace) -> int:
    where = places(options)
    try:
        sections = look(where.socket).sections
        found = sections.get("auth")
        value = {"supervisor": "running", **found} if isinstance(found, dict) else None
    except NoAnswerError as nobody:
        value = {"supervisor": nobody.code, **_status_alone(where.state / CREDENTIAL_FILE)}
    if value is None:
        fix = "update the supervisor and start it again"
        raise _Answer("other_version", "the running supervisor says nothing of keys", fix, ExitCode.UNAVAILABLE)
    return done(options, value, _status_text(value))


def _status_alone(credential: Path) -> dict[str, Any]:
    """The same answer without a supervisor: what its next start would find."""
    from distensor.comm.credential import load_credential

    store, environment = _store(), dict(os.environ)
    try:
        identity = load_credential(credential)
        found = take_given(None, environment) or store.find(registered=identity is not None)
    except DistensorError as error:
        raise refusal(error) from error
    state = "registered" if identity else "missing" if found is None else "unproven"
    return {
        "state": state,
        "source": None if found is None else found.source.value,
        "where": None if found is None else found.where,
        "key": None if found is None else found.masked,
        "hub": None if identity is None else identity.address,
        "node_id": None if identity is None else identity.node_id,
        "registered_at": credential.stat().st_mtime if identity is not None else None,
        "problem": "; ".join(store.notes) or None,
        "fix": None if state != "missing" else "distensor auth login",
    }


def _status_text(value: Mapping[str, Any]) -> str:
    at = value.get("registered_at")
    since = f" since {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC" if isinstance(at, int | float) else ""
    key = f"{value['key']} from {value['source']} ({value['where']})" if value.get("key") else "none"
    rows = [
        f"state       {value['state']}{since}",
        f"key         {key}",
        f"hub         {value.get('hub') or 'not known'}",
        f"node        {value.get('node_id') or 'not registered'}",
        f"supervisor  {value['supervisor']}",
        *(f"{name:<11} {value[name]}" for name in ("problem", "fix") if value.get(name)),
    ]
    return "\n".join(rows)


# logout


def _logout(options: argparse.Namespace) -> int:
    where = places(options)
    result: Mapping[str, Any]
    try:
        if options.system:
            result = _of_the_system(_system_key(options).log_out)
        else:
            result = ask(where.socket, "auth_logout", {})
    except NoAnswerError as nobody:
        if nobody.code != "not_running":
            fix = "run this as the user of the supervisor"
            raise _Answer(nobody.code, str(nobody), fix, ExitCode.UNAVAILABLE) from nobody
        try:
            removed, identity = _store().forget(), set_aside(where.state / CREDENTIAL_FILE)
        except DistensorError as error:
            raise refusal(error) from error
        result = {"removed": list(removed), "identity": identity}
    removed_text = ", ".join(result["removed"]) or "no stored key"
    rows = [f"logged out: removed {removed_text}"]
    if result["identity"]:
        rows.append(
            f"  this machine's identity is kept in {result['identity']}; a login at the same hub brings it back"
        )
    if any(os.environ.get(name) for name in ("DISTENSOR_API_KEY", "DISTENSOR_JOIN_TOKEN")):
        rows.append("  the environment still sets a key: unset it, or the next start uses it")
    return done(options, result, "\n".join(rows))
