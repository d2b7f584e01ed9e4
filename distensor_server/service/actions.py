"""Install, remove and look at the service: the unit file, the manager and the list of what was made, in this order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from distensor.core.errors import ServiceError, StoreError
from distensor_server.service.manager import ServiceManager, ServiceState, ServiceStatus
from distensor_server.service.manifest import Entry, Kind, Manifest, digest, missing_folders
from distensor_server.service.ownership import Owner, owner_of

Say = Callable[[str], None]


def install(
    manager: ServiceManager, manifest: Manifest, say: Say, *, dry_run: bool = False, keep_running: bool = False
) -> None:
    """Write the unit and start it. Again: write it anew if it is ours, and restart.

    Args:
        keep_running: leave alone what runs from the very unit that would be written; a restart would end its work.

    Raises:
        ServiceError: a unit that is not ours is in the way, there is no manager, or it refuses; nothing is left then.
        StoreError: the unit cannot be written.
    """
    text = manager.render()
    before = _read(manager.unit_path)
    _refuse_foreign(manager.unit_path, owner_of(before))
    if dry_run:
        say(f"would write {manager.unit_path} and start it")
        return
    if reason := manager.available():
        raise ServiceError(reason)
    if keep_running and before == text and healthy(manager.status()):
        say("it runs already")
        return
    _write(manager.unit_path, text, manifest)
    say(f"wrote {manager.unit_path}")
    try:
        manager.activate()
    except ServiceError:
        _restore(manager, manifest, before)
        raise
    say("started")


def _refuse_foreign(path: Path, owner: Owner) -> None:
    if owner is Owner.OTHERS:
        raise ServiceError(f"{path} was not written by disTensor and is left alone; move it away, then try again")
    if owner is Owner.CHANGED:
        raise ServiceError(
            f"{path} was changed by hand and is left alone; put the changes into a drop-in "
            f"({path.name}.d/*.conf on systemd), remove the file, then try again"
        )


def _restore(manager: ServiceManager, manifest: Manifest, before: str | None) -> None:
    """A unit that does not start is not left behind; one that was there before comes back and is started again."""
    if before is not None:
        _write(manager.unit_path, before, manifest)
        manager.activate()
        return
    with contextlib.suppress(ServiceError):  # it never started, and the error that is on its way says why
        manager.deactivate()
    _remove(manager.unit_path, manifest)
    manager.forget()


def uninstall(manager: ServiceManager, manifest: Manifest, say: Say, *, dry_run: bool = False) -> None:
    """Stop the service and remove its unit; nothing to do is no error.

    Raises:
        ServiceError: it does not stop, or the unit is not ours (it is left alone and goes on).
    """
    owner = owner_of(_read(manager.unit_path))
    if owner is Owner.NOBODY:
        say("there is no service")
        return
    if owner is Owner.OTHERS:
        raise ServiceError(f"{manager.unit_path} was not written by disTensor and is left alone")
    if dry_run:
        say(f"would stop the service and remove {manager.unit_path}")
        return
    if manager.available() is None:
        manager.deactivate()
    _remove(manager.unit_path, manifest)
    manager.forget()
    say(f"stopped, and removed {manager.unit_path}")


def status(manager: ServiceManager) -> ServiceStatus:
    """What the manager says; a machine without one has no service installed."""
    return manager.status()


def healthy(found: ServiceStatus) -> bool:
    return found.state is ServiceState.RUNNING


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def _write(path: Path, text: str, manifest: Manifest) -> None:
    """Recorded before it is made, the folders too; replaced as a whole."""
    for folder in missing_folders(path):
        manifest.record(Entry(kind=Kind.DIRECTORY, path=folder))
    manifest.record(Entry(kind=Kind.FILE, path=path, sha256=digest(text.encode())))
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text)
        new.chmod(0o644)
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}") from error


def _remove(path: Path, manifest: Manifest) -> None:
    """The unit, and those folders of it that the installation made and that are empty now."""
    path.unlink(missing_ok=True)
    manifest.forget(path)
    made = [entry.path for entry in manifest.entries() if entry.kind is Kind.DIRECTORY]
    for folder in sorted((p for p in path.parents if p in made), key=lambda p: len(p.parts), reverse=True):
        try:
            folder.rmdir()
        except OSError:
            return  # somebody else uses it by now
        manifest.forget(folder)
