"""Certificates of PEM files: order, validity, kind of key, invalid input."""

from __future__ import annotations

import binascii
import contextlib
import sys
from datetime import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from handrail.security.certificates import certificates, key_kind, validity_unix_s
from handrail.security.tls import ServerTls
from harness.certs import Authority

KEY = ec.generate_private_key(ec.SECP256R1())
BEGINS, ENDS = datetime(2020, 1, 1), datetime(2030, 1, 1)
Signer = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey


def made(name: str = "x", key: Signer = KEY) -> x509.Certificate:
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(who, who, key.public_key(), 7, BEGINS, ENDS)
    edwards = isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(key, None if edwards else hashes.SHA256())


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def pem_of(der: bytes) -> bytes:
    return b"".join((b"-----BEGIN CERTIFICATE-----\n", binascii.b2a_base64(der), b"-----END CERTIFICATE-----\n"))


WHOLE = made().public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (KEY, "P-256"),
        (ec.generate_private_key(ec.SECP384R1()), "P-384"),
        (ec.generate_private_key(ec.SECP521R1()), "P-521"),
        (ec.generate_private_key(ec.SECP256K1()), "of another kind"),
        (rsa.generate_private_key(65537, 2048), "RSA"),
        (ed25519.Ed25519PrivateKey.generate(), "Ed25519"),
        (ed448.Ed448PrivateKey.generate(), "of another kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_kind_of_key(key: Signer, kind: str) -> None:
    assert key_kind(certificates(pem(made(key=key)))[0]) == kind


def test_validity_counts_seconds_of_universal_time() -> None:
    epoch = datetime(1970, 1, 1)
    expected = (int((BEGINS - epoch).total_seconds()), int((ENDS - epoch).total_seconds()))
    assert [validity_unix_s(each) for each in certificates(pem(made()))] == [expected]


def test_what_is_cut_short_is_no_certificate() -> None:
    for end in range(1, len(WHOLE)):
        with pytest.raises(ValueError, match="damaged"):
            certificates(pem_of(WHOLE[:end]))


@given(st.binary(max_size=300))
def test_garbage_is_a_value_error(garbage: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        certificates(pem_of(garbage))


@given(st.data())
def test_a_damaged_certificate_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(WHOLE)
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        for each in certificates(pem_of(bytes(whole))):
            key_kind(each)


def test_a_root_with_serial_number_0_is_read_without_a_warning() -> None:
    old = WHOLE.replace(b"\x02\x01\x07", b"\x02\x01\x00", 1)
    assert len(certificates(pem_of(old))) == 1


def test_all_certificates_of_a_file_in_their_order() -> None:
    two = [made(name) for name in "ab"]
    assert certificates(b"# first\n" + b"Bag Attributes\n  \xc3\xbc\n".join(map(pem, two))) == two
    assert certificates(b"nothing") == []


def test_a_damaged_pem_is_reported() -> None:
    with pytest.raises(ValueError, match="damaged"):
        certificates(b"-----BEGIN CERTIFICATE-----\nAAA\n-----END CERTIFICATE-----\n")


def test_tls_without_the_library_names_the_file_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Authority(tmp_path).files("server")
    monkeypatch.setitem(sys.modules, "cryptography", None)  # an import of it raises ModuleNotFoundError
    with pytest.raises(ValueError, match=r"tls\.cert_file: .* needs the package cryptography: pip install 'handrail\[sidecar\]'"):
        ServerTls(files.cert, files.key)
