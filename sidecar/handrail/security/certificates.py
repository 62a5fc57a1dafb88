"""Certificates of a PEM file: their validity and the kind of their keys.

The standard library shows no fields of a certificate that it has not verified, and a process never verifies its own:
``cryptography`` reads them. It is imported with the first certificate, so a process without TLS needs and loads nothing.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
_OTHER: Final = "of another kind"


def certificates(pem: bytes) -> list[Certificate]:
    """Certificates of a PEM file, in their order; none is an empty list.

    Text between them is skipped. Raises ``ValueError`` for a damaged one, and where ``cryptography`` is not installed.
    """
    if _BEGIN not in pem:
        return []
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        raise ValueError("reading it needs the package cryptography: pip install 'handrail[sidecar]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # public bundles hold old roots with serial number 0, which OpenSSL takes
        try:
            found = x509.load_pem_x509_certificates(pem)
            for each in found:
                validity_unix_s(each)  # read lazily, and damaged too
        except ValueError as error:
            raise ValueError(f"a certificate in it is damaged ({error})") from None
    return found


def validity_unix_s(certificate: Certificate) -> tuple[int, int]:
    """First and last second of validity, both included, since the epoch."""
    return int(certificate.not_valid_before_utc.timestamp()), int(certificate.not_valid_after_utc.timestamp())


def key_kind(certificate: Certificate) -> str:
    """Kind of a certificate's key.

    ``RSA``, ``P-256``, ``P-384``, ``P-521``, ``Ed25519``, else ``of another kind``. Raises ``ValueError`` for a damaged key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    try:
        key = certificate.public_key()
    except UnsupportedAlgorithm:
        return _OTHER
    if isinstance(key, ec.EllipticCurvePublicKey):
        return _CURVES.get(key.curve.name, _OTHER)
    if isinstance(key, rsa.RSAPublicKey):
        return "RSA"
    return "Ed25519" if isinstance(key, ed25519.Ed25519PublicKey) else _OTHER
