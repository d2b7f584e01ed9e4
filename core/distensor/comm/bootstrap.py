"""First contact with a hub: read its authority, compare the fingerprint, trust nothing else.

The probe connection carries no secret. Whoever answers with another authority is refused here; whoever copies
the authority's public certificate without its key fails the verified handshake that follows.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
from typing import Any, cast

from distensor.comm.address import HubAddress, proxy_in_the_way
from distensor.core.errors import AuthenticationError, HubProtocolError, HubUnreachableError

HUB_NAME = "distensor-hub"
"""The DNS name in every hub's certificate; the authority, not the network name, says which hub it is."""


def fingerprint_of(certificate_der: bytes) -> str:
    return hashlib.sha256(certificate_der).hexdigest()


def fingerprint_of_pem(certificate_pem: str) -> str:
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(certificate_pem))


def fetch_authority(address: HubAddress, fingerprint: str, timeout: float) -> str:
    """The PEM of the hub's authority, if it is the one with this fingerprint.

    Raises:
        HubUnreachableError: nothing listens there, or not in time.
        HubProtocolError: something listens that does not speak TLS.
        AuthenticationError: a hub, but not the one that the token names.
    """
    chain = _read_chain(address, timeout)
    for der in chain:
        if hmac.compare_digest(fingerprint_of(der), fingerprint):
            return ssl.DER_cert_to_PEM_cert(der)
    seen = fingerprint_of(chain[-1])[:16] if chain else "no certificate"
    raise AuthenticationError(
        f"the hub at {address} has authority {seen}, but {fingerprint[:16]} was expected: "
        "it is another hub, its state was replaced, or someone is in between. No secret was sent."
    )


def _read_chain(address: HubAddress, timeout: float) -> list[bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((address.host, address.port), timeout) as raw,
            context.wrap_socket(raw, server_hostname=HUB_NAME) as connection,
        ):
            return _unverified_chain(connection)
    except ssl.SSLError as error:
        raise HubProtocolError(f"{address} answers, but not as a hub with TLS ({error.reason or error})") from error
    except TimeoutError as error:
        raise HubUnreachableError(f"no hub answers at {address} within {timeout:g} s{_hint(address)}") from error
    except OSError as error:
        raise HubUnreachableError(f"no hub at {address}: {error.strerror or error}{_hint(address)}") from error


def _unverified_chain(connection: ssl.SSLSocket) -> list[bytes]:
    if hasattr(connection, "get_unverified_chain"):  # Python 3.13 and later
        return cast("list[bytes]", connection.get_unverified_chain())
    certificates: Any = cast("Any", connection)._sslobj.get_unverified_chain()
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in certificates or []]


def _hint(address: HubAddress) -> str:
    proxy = proxy_in_the_way(address.host)
    return f" (the environment sets {proxy}; hubs are reached directly)" if proxy else ""
