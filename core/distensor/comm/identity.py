"""Keys and certificate requests for places on the data plane of a job."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from distensor.core.ids import Epoch, JobId, Rank, data_plane_uri, parse_data_plane_uri

__all__ = ["data_plane_uri", "new_key_and_csr", "parse_data_plane_uri"]


def new_key_and_csr(job_id: JobId, epoch: Epoch | None, rank: Rank) -> tuple[bytes, str]:
    """A new P-256 key and a request for its certificate, both PEM.

    The names in the request are for people who look at it; the hub writes the certificate's identity itself.
    The driver asks before its job has an epoch, hence None.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    label = f"{job_id}/{'-' if epoch is None else epoch}/{rank}"[:64]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return private_key_pem(key), request.public_bytes(serialization.Encoding.PEM).decode()


def private_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
