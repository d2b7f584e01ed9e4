"""Checks of files, permissions, disk, memory and limits of this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from distensor.core.reading import Unavailable
from distensor_server.doctor.model import Finding, World, fail, ok, warning

GIB = 1 << 30
LITTLE_DISK, NO_DISK = 2 * GIB, GIB // 4
LITTLE_MEMORY, NO_MEMORY = 2 * GIB, GIB // 2
FEW_FILES = 1024
FEW_WATCHES = 8192
LONGEST_SOCKET_PATH = 100


def state(world: World) -> Finding:
    """The state directory: there or to be made, ours, private."""
    path = world.state
    if not path.exists():
        return _to_be_made(path)
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        return fail("state", f"{path} is no directory", "remove it, or give another by --state")
    if found.st_uid != world.uid:
        return fail("state", f"{path} belongs to user {found.st_uid}", f"sudo chown -R {world.uid} {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        return fail("state", f"{path} cannot be written", f"chmod u+rwx {path}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return warning("state", f"others can look into {path} (mode {mode:04o})", f"chmod 700 {path}")
    return ok("state", f"{path} is private and can be written")


def _to_be_made(path: Path) -> Finding:
    parent = next(place for place in path.parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return fail("state", f"{path} cannot be made: {parent} cannot be written", "give another by --state")
    return ok("state", f"{path} will be made at the first start")


def identity(world: World) -> Finding:
    """The file with the node's identity."""
    path = world.state / "credential.json"
    if not path.exists():
        return ok("identity", "none yet: it comes with the first connection to the hub")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return fail("identity", f"others can read {path} (mode {mode:04o})", f"chmod 600 {path}")
    if not world.registered:
        fix = f"move {path} away and log in with a new key: distensor auth login"
        return fail("identity", f"{path} is damaged", fix)
    return ok("identity", "this machine is registered")


def socket(world: World) -> Finding:
    """The running supervisor, by its socket."""
    found = world.look()
    if len(os.fsencode(world.socket)) > LONGEST_SOCKET_PATH:
        fix = "give a shorter one: DISTENSOR_SOCKET=/tmp/distensor.sock"
        return fail("supervisor", f"the path of its socket is too long: {world.socket}", fix)
    if not isinstance(found, Unavailable):
        version = str(found.hello.get("server_version"))
        if version != world.version:
            text = f"running, but of version {version}; installed is {world.version}"
            return warning("supervisor", text, "restart it: distensor service install, or end and start it")
        return ok("supervisor", f"running, version {version}, process {found.hello.get('pid')}")
    if found.reason.startswith("not_permitted"):
        return fail("supervisor", found.reason, "run this as the user of the supervisor")
    if not found.reason.startswith("not_running"):
        return fail("supervisor", found.reason, "end the process that holds the socket, and start the supervisor again")
    if world.socket.exists() and not world.socket.is_socket():
        return fail("supervisor", f"{world.socket} is no socket", "remove it, or give another path by --socket")
    if world.socket.exists():
        text = f"not running; it left its socket behind: {world.socket}"
        return warning("supervisor", text, "start it: distensor service install, or distensor-server run")
    return warning("supervisor", "not running", "start it: distensor service install, or distensor-server run")


def disk(world: World) -> Finding:
    place = next(path for path in (world.state, *world.state.parents) if path.exists())
    free = world.disk_free(place)
    text = f"{free / GIB:.1f} GiB free at {place}"
    if free < NO_DISK:
        return fail("disk", text, "make room: nothing can be kept or logged")
    return warning("disk", text, "make room: models and logs need some") if free < LITTLE_DISK else ok("disk", text)


def memory(world: World) -> Finding:
    """What this process may use: a container's limit counts."""
    found = world.memory()
    text = f"{found.free / GIB:.1f} of {found.total / GIB:.1f} GiB free"
    if found.total < NO_MEMORY:
        return fail("memory", text, "a worker needs more; raise the container's limit")
    if found.free < LITTLE_MEMORY:
        return warning("memory", text, "end other programs, or raise the container's limit: a worker may not fit")
    return ok("memory", text)


def files(world: World) -> Finding:
    if world.open_files < FEW_FILES:
        text = f"this user may have only {world.open_files} files open"
        return warning("files", text, "raise it: ulimit -n 4096, or LimitNOFILE= in the unit")
    return ok("files", f"{world.open_files} open files are allowed")


def watches(world: World) -> Finding:
    """inotify, which torch's loaders and editors use up."""
    try:
        number = int((world.root / "proc/sys/fs/inotify/max_user_watches").read_text())
    except (OSError, ValueError):
        return ok("watches", "no limit of file watches is known here")
    if number < FEW_WATCHES:
        fix = "sudo sysctl fs.inotify.max_user_watches=524288"
        return warning("watches", f"only {number} file watches are allowed", fix)
    return ok("watches", f"{number} file watches are allowed")
