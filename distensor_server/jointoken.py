"""Where the join token comes from. Never from the command line: every user of the machine can read that."""

from __future__ import annotations

import stat
from collections.abc import MutableMapping
from pathlib import Path

from distensor.core.errors import AuthenticationError

VARIABLE = "DISTENSOR_JOIN_TOKEN"
CREDENTIAL_NAME = "join-token"
_LONGEST = 4096


def find_token(token_file: Path | None, environment: MutableMapping[str, str]) -> str | None:
    """The token of --token-file, else of systemd's credentials, else of the environment; None without any.

    The variable is taken out of `environment`, so that no child inherits it.

    Raises:
        AuthenticationError: a file cannot be read, or others can read it too. The message holds no secret.
    """
    from_variable = environment.pop(VARIABLE, "").strip()
    if token_file is not None:
        return _read_private(token_file)
    directory = environment.get("CREDENTIALS_DIRECTORY")
    if directory and (Path(directory) / CREDENTIAL_NAME).exists():
        # systemd guards this directory itself: its files are readable by this service only.
        return _read(Path(directory) / CREDENTIAL_NAME)
    return from_variable or None


def _read_private(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise AuthenticationError(f"token file {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise AuthenticationError(
            f"token file {path} has mode {stat.S_IMODE(mode):04o}: others can read it; run `chmod 600 {path}`"
        )
    return _read(path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST).decode("ascii").strip()
    except OSError as error:
        raise AuthenticationError(f"token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AuthenticationError(f"token file {path} does not hold a token: it is not plain text") from error
    if not text:
        raise AuthenticationError(f"token file {path} is empty; put the hub's join token (dtj_...) into it")
    return text
