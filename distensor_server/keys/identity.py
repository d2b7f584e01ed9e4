"""A node's identity at logout and login. It is kept, for the earnings at the hub belong to it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from distensor.comm.credential import load_credential
from distensor.core.errors import StoreError

ASIDE = "credential.logged-out.json"


def set_aside(credential: Path) -> str | None:
    """Move the identity away, so that nothing connects with it; where it is now.

    Raises:
        StoreError: it cannot be moved.
    """
    kept = credential.with_name(ASIDE)
    try:
        credential.replace(kept)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"identity {credential}: {error.strerror}") from error
    return str(kept)


def bring_back(credential: Path, fingerprint: str) -> bool:
    """After a login at the hub with this fingerprint: be again who this machine was there, if it was set aside."""
    kept = credential.with_name(ASIDE)
    with contextlib.suppress(StoreError, OSError):  # a damaged one is no reason to refuse a good key
        if credential.exists():
            return False
        found = load_credential(kept)
        if found is not None and found.fingerprint == fingerprint:
            kept.replace(credential)
            return True
    return False
