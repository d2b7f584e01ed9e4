"""The identity that a node keeps: who it is, which hub it trusts, and the secret between the two."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distensor.comm.address import parse_address
from distensor.comm.bootstrap import fingerprint_of_pem
from distensor.core.errors import StoreError
from distensor.core.ids import NodeId, is_valid_name

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCredential:
    """Kept in a file of mode 0600. Its `repr` does not show the secret."""

    node_id: NodeId
    address: str
    authority_pem: str = field(repr=False)
    secret: str = field(repr=False)
    others: tuple[str, ...] = ()
    """Where the same hub is when it is not at `address`."""

    @property
    def fingerprint(self) -> str:
        return fingerprint_of_pem(self.authority_pem)


def load_credential(path: Path) -> NodeCredential | None:
    """The credential in the file, or None when there is no file.

    Raises:
        StoreError: the file cannot be read or is damaged.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return _from_fields(fields)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"credential file {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"credential file {path} is damaged ({type(error).__name__}); delete it and join with a new token"
        ) from error


def _from_fields(fields: dict[str, object]) -> NodeCredential:
    if fields["version"] != _VERSION:
        raise ValueError(f"version {fields['version']!r}")
    names = ("node_id", "address", "authority_pem", "secret")
    node_id, address, authority_pem, secret = (str(fields[name]) for name in names)
    if not is_valid_name(node_id) or not secret:
        raise ValueError("node_id or secret")
    others = fields.get("others", [])
    if not isinstance(others, list):
        raise ValueError("others")
    for one in (address, *others):
        parse_address(one)
    credential = NodeCredential(
        node_id=NodeId(node_id), address=address, authority_pem=authority_pem, secret=secret, others=tuple(others)
    )
    assert credential.fingerprint  # reads the PEM, which raises ValueError when it is none
    return credential


def save_credential(path: Path, credential: NodeCredential) -> None:
    """Replace the file in one step, so that a crash leaves the old one or the new one. When this returns, the new one
    survives a loss of power: the hub takes the join token for used up as soon as the credential was shown.

    Raises:
        StoreError: the file cannot be written.
    """
    text = json.dumps({"version": _VERSION, **asdict(credential)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mkstemp gives mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"credential file {path}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    """The name of a new file is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
