"""The dates of certificates, read from DER.

The tests compare them with those that another implementation wrote, and read input that is no certificate.
"""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from handrail.security.certificates import Validity, certificates, key_kind, validity

KEY = ec.generate_private_key(ec.SECP256R1())
MOMENTS = st.datetimes(datetime(1950, 1, 1), datetime(2200, 1, 1)).map(lambda each: each.replace(microsecond=0))


Signer = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey


def made(begins: datetime, ends: datetime, name: str = "x", serial: int = 7, key: Signer = KEY) -> x509.Certificate:
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(who, who, key.public_key(), serial, begins, ends)
    edwards = isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(key, None if edwards else hashes.SHA256())


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


WHOLE = der(made(datetime(2020, 1, 1), datetime(2030, 1, 1)))


def unix_s(moment: datetime) -> int:
    return int((moment - datetime(1970, 1, 1)).total_seconds())


@given(MOMENTS, MOMENTS, st.text("abcdefgh", min_size=1, max_size=60), st.integers(1, 2**158))
def test_the_dates_are_those_that_were_written(one: datetime, other: datetime, name: str, serial: int) -> None:
    begins, ends = min(one, other), max(one, other)
    assert validity(der(made(begins, ends, name, serial))) == Validity(unix_s(begins), unix_s(ends))


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
    assert key_kind(der(made(datetime(2020, 1, 1), datetime(2030, 1, 1), key=key))) == kind


def test_both_ends_count() -> None:
    dates = Validity(10, 20)
    assert [dates.holds(at) for at in (9.9, 10, 15, 20, 20.1)] == [False, True, True, True, False]


def test_what_is_cut_short_is_no_certificate() -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(ValueError, match=r"cut short|no X\.509"):
            validity(WHOLE[:end])


@given(st.binary(max_size=300))
def test_garbage_is_a_value_error(garbage: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        validity(garbage)


@given(st.data())
def test_a_damaged_certificate_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(WHOLE)
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        validity(bytes(whole))
        key_kind(bytes(whole))


def test_all_certificates_of_a_file_in_their_order() -> None:
    two = [made(datetime(2020, 1, 1), datetime(2030, 1, 1), name) for name in "ab"]
    pem = b"Bag Attributes\n  \xc3\xbc\n".join(each.public_bytes(serialization.Encoding.PEM) for each in two)
    assert certificates(b"# first\n" + pem) == [der(each) for each in two]
    assert certificates(b"nothing") == []


def test_a_damaged_pem_is_reported() -> None:
    with pytest.raises(ValueError, match="damaged"):
        certificates(b"-----BEGIN CERTIFICATE-----\nAAA\n-----END CERTIFICATE-----\n")


def test_times_are_universal() -> None:
    begins = datetime(2026, 6, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    found = validity(der(made(begins.astimezone(timezone.utc).replace(tzinfo=None), datetime(2030, 1, 1))))
    assert found.not_before_unix_s == int(begins.timestamp())
