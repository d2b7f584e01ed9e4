"""Where a hub is to be found, as its state directory says: what every token carries beside a secret."""

from __future__ import annotations

from dataclasses import dataclass

from distensor.comm.address import HubAddress, parse_address
from distensor.comm.bootstrap import fingerprint_of_pem
from distensor.comm.tokens import JoinToken, Role
from distensor.core.errors import ConfigError, StoreError
from distensor.hub.state_directory import StateDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The address at which the hub listened last, its authority, and where its other hubs are."""

    address: HubAddress
    fingerprint: str
    others: tuple[HubAddress, ...] = ()

    def token(self, role: Role, secret: str) -> str:
        """What a machine or a script needs to reach this hub with a secret."""
        token = JoinToken(
            address=self.address, fingerprint=self.fingerprint, role=role, secret=secret, others=self.others
        )
        return token.encode()


def place_of(directory: StateDirectory) -> Place | None:
    """None when no hub has been started on this directory.

    Raises:
        StoreError: it cannot be read, or is damaged.
    """
    try:
        text = directory.address_file.read_text(encoding="utf-8")
        authority = (directory.path / "authority.pem").read_text(encoding="utf-8")
        address, *others = map(parse_address, text.split())
        return Place(address=address, fingerprint=fingerprint_of_pem(authority), others=tuple(others))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"state directory {directory.path}: {error.strerror}") from error
    except (ConfigError, ValueError) as error:
        raise StoreError(f"state directory {directory.path}: address or authority is damaged ({error})") from error
