"""The hub's authority: kept, private, and the only one who says who a member is."""

from __future__ import annotations

import base64
import datetime
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from distensor.comm.bootstrap import fingerprint_of_pem
from distensor.comm.identity import new_key_and_csr
from distensor.core.errors import HubProtocolError, StoreError
from distensor.core.ids import DRIVER_RANK, Epoch, JobId, Rank
from distensor.hub.pki import Authority
from distensor.testing.clock import FakeClock

JOB = JobId("j_1")


def signed(authority: Authority, rank: Rank = Rank(3)) -> x509.Certificate:  # noqa: B008  # an int
    csr = new_key_and_csr(JOB, Epoch(2), rank)[1]
    return x509.load_pem_x509_certificate(authority.sign(csr, JOB, Epoch(2), rank).encode())


def uris(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert len(names) == len(names.get_values_for_type(x509.UniformResourceIdentifier))
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def test_it_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    first = Authority.load_or_create(tmp_path, FakeClock())
    again = Authority.load_or_create(tmp_path, FakeClock())
    assert first.authority_pem == again.authority_pem
    assert again.fingerprint == fingerprint_of_pem(first.authority_pem)
    assert stat.S_IMODE((tmp_path / "authority.key").stat().st_mode) == 0o600


def test_a_member_is_who_the_hub_says(tmp_path: Path) -> None:
    authority = Authority.load_or_create(tmp_path, FakeClock())
    assert uris(signed(authority)) == ["distensor://j_1/2/3"]
    assert uris(signed(authority, DRIVER_RANK)) == ["distensor://j_1/2/-1"]
    signed(authority).verify_directly_issued_by(x509.load_pem_x509_certificate(authority.authority_pem.encode()))


def test_what_the_request_says_of_itself_is_not_believed(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "distensor-hub")])
    lies = [x509.DNSName("distensor-hub"), x509.UniformResourceIdentifier("distensor://other/9/9")]
    request = x509.CertificateSigningRequestBuilder().subject_name(name)
    request = request.add_extension(x509.SubjectAlternativeName(lies), critical=False)
    request = request.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    csr = request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    authority = Authority.load_or_create(tmp_path, FakeClock())
    certificate = x509.load_pem_x509_certificate(authority.sign(csr, JOB, Epoch(1), Rank(0)).encode())
    assert uris(certificate) == ["distensor://j_1/1/0"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert "distensor-hub" not in certificate.subject.rfc4514_string()


def test_a_members_certificate_lives_for_hours_from_the_moment_it_is_signed(tmp_path: Path) -> None:
    clock = FakeClock(now=1_800_000_000)
    certificate = signed(Authority.load_or_create(tmp_path, clock))
    now = datetime.datetime.fromtimestamp(clock.now(), tz=datetime.UTC)
    assert certificate.not_valid_before_utc == now
    assert certificate.not_valid_after_utc == now + datetime.timedelta(hours=6)


def test_certificates_of_one_hub_follow_each_other_although_its_clock_is_set(tmp_path: Path) -> None:
    clock = FakeClock(now=1_800_000_000)
    authority = Authority.load_or_create(tmp_path, clock)
    first = signed(authority)
    for jump in (86_400, -2 * 86_400):
        clock.jump_wall(jump)
        clock.advance(1)
    after = signed(authority).not_valid_before_utc - first.not_valid_before_utc
    assert after == datetime.timedelta(seconds=2)


def test_a_certificate_is_signed_anew_for_the_same_key(tmp_path: Path) -> None:
    clock = FakeClock(now=1_800_000_000)
    authority = Authority.load_or_create(tmp_path, clock)
    old = authority.sign(new_key_and_csr(JOB, Epoch(2), Rank(3))[1], JOB, Epoch(2), Rank(3))
    clock.advance(60)
    before, after = (
        x509.load_pem_x509_certificate(text.encode())
        for text in (old, authority.sign_anew(old, JOB, Epoch(2), Rank(3)))
    )
    assert before.public_key() == after.public_key()
    assert uris(after) == uris(before)
    assert after.not_valid_before_utc - before.not_valid_before_utc == datetime.timedelta(seconds=60)


def test_only_our_own_certificates_are_signed_anew(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority.load_or_create(tmp_path / "other", FakeClock())
    foreign = other.sign(new_key_and_csr(JOB, Epoch(2), Rank(3))[1], JOB, Epoch(2), Rank(3))
    for text in (foreign, "", "-----BEGIN CERTIFICATE-----"):
        with pytest.raises(HubProtocolError, match="rank 3 of job j_1 is none of this hub"):
            Authority.load_or_create(tmp_path, FakeClock()).sign_anew(text, JOB, Epoch(2), Rank(3))


def with_rsa() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def with_another_curve() -> str:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed_request = request.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    return signed_request.public_bytes(serialization.Encoding.PEM).decode()


def with_an_unknown_kind_of_key() -> str:
    """Found by the fuzzer: the reading of such a key has an error of its own."""
    return _changed(lambda der: der.replace(bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d0209")))


def with_a_broken_signature() -> str:
    return _changed(lambda der: der[:-5] + bytes([der[-5] ^ 1]) + der[-4:])


def _changed(change: Callable[[bytes], bytes]) -> str:
    der = change(
        x509.load_pem_x509_csr(new_key_and_csr(JOB, None, Rank(0))[1].encode()).public_bytes(serialization.Encoding.DER)
    )
    body = base64.encodebytes(bytes(der)).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"


@pytest.mark.parametrize(
    "make",
    [
        str,
        lambda: "\x00",
        lambda: "x" * 5000,
        with_rsa,
        with_another_curve,
        with_an_unknown_kind_of_key,
        with_a_broken_signature,
    ],
)
def test_a_request_that_is_none_is_refused(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    with pytest.raises(HubProtocolError, match="certificate request"):
        Authority.load_or_create(tmp_path, FakeClock()).sign(make(), JOB, Epoch(1), Rank(0))


@pytest.mark.parametrize("name", ["authority.key", "authority.pem"])
def test_a_damaged_file_is_named_and_not_replaced(tmp_path: Path, name: str) -> None:
    Authority.load_or_create(tmp_path, FakeClock())
    (tmp_path / name).write_text("-----BEGIN NONSENSE-----")
    with pytest.raises(StoreError, match="damaged; restore both"):
        Authority.load_or_create(tmp_path, FakeClock())
    assert (tmp_path / name).read_text() == "-----BEGIN NONSENSE-----"


def test_a_key_of_another_authority_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    Authority.load_or_create(tmp_path, FakeClock())
    Authority.load_or_create(tmp_path / "other", FakeClock())
    (tmp_path / "authority.key").write_bytes((tmp_path / "other" / "authority.key").read_bytes())
    with pytest.raises(StoreError, match="is not the key of"):
        Authority.load_or_create(tmp_path, FakeClock())


def test_a_start_that_was_killed_between_the_two_files_is_repeated(tmp_path: Path) -> None:
    Authority.load_or_create(tmp_path, FakeClock())
    (tmp_path / "authority.pem").unlink()
    assert Authority.load_or_create(tmp_path, FakeClock()).authority_pem
