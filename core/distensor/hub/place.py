"""Where a hub is to be found, as its state directory says: what every token carries beside a secret."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.comm.address import HubAddress, parse_address
from distensor.comm.bootstrap import fingerprint_of_pem
from distensor.core.errors import ConfigError, StoreError
from distensor.hub.state_directory import StateDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The address at which the hub listened last, and its authority."""

    address: HubAddress
    fingerprint: str


def place_of(directory: StateDirectory) -> Place | None:
    """None when no hub has been started on this directory.

    Raises:
        StoreError: it cannot be read, or is damaged.
    """
    try:
        text = directory.address_file.read_text(encoding="utf-8")
        authority = (directory.path / "authority.pem").read_text(encoding="utf-8")
        return Place(address=parse_address(text.strip()), fingerprint=fingerprint_of_pem(authority))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"state directory {directory.path}: {error.strerror}") from error
    except (ConfigError, ValueError) as error:
        raise StoreError(f"state directory {directory.path}: address or authority is damaged ({error})") from error
