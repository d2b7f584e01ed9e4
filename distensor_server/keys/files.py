"""Key files: read only where nobody else can, written whole with mode 0600."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from distensor.core.errors import AuthenticationError, StoreError

LONGEST = 4096
ROOT_UID = 0


def read_private(path: Path, *, follow: bool = False) -> str | None:
    """The key in the file; None when there is no file.

    Looked at and read through one descriptor, so that nobody can exchange the file in between. `follow`: a path that
    the owner named may be a symbolic link; our own never is one.

    Raises:
        AuthenticationError: it cannot be read, belongs to another user, others can read it, or it holds no text.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not follow and error.errno == errno.ELOOP:
            raise AuthenticationError(f"key file {path} is a symbolic link; put the file itself there") from error
        raise AuthenticationError(f"key file {path}: {error.strerror}") from error
    try:
        _check(path, os.fstat(fd))
        raw = os.read(fd, LONGEST)
    except OSError as error:
        raise AuthenticationError(f"key file {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    return read_text(path, raw)


def _check(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise AuthenticationError(f"key file {path} is no ordinary file")
    if found.st_uid not in (os.geteuid(), ROOT_UID):
        raise AuthenticationError(f"key file {path} belongs to user {found.st_uid}; run `chown {os.geteuid()} {path}`")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthenticationError(f"key file {path} has mode {mode:04o}: others can read it; run `chmod 600 {path}`")


def read_text(path: Path, raw: bytes) -> str:
    """Raises: AuthenticationError: not one line of text."""
    try:
        text = raw.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise AuthenticationError(f"key file {path} does not hold a key: it is not plain text") from error
    if not text:
        raise AuthenticationError(f"key file {path} is empty; put the key (dtj_...) into it")
    return text


def write_private(path: Path, key: str) -> None:
    """Replace the file in one step.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")  # mkstemp gives mode 0600
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(key + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:  # whatever came in between, no copy of the key may stay behind
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        raise StoreError(f"key file {path}: {error.strerror}") from error


def remove(path: Path) -> bool:
    """Whether there was one.

    Raises:
        StoreError: it cannot be removed.
    """
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"key file {path}: {error.strerror}") from error
    return True
