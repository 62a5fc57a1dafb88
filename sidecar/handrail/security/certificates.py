"""Validity and key kind of the certificates in a PEM file.

The standard library shows no fields of a certificate that it has not verified, and a process never verifies its own.
Source: RFC 5280 sections 4.1 and 4.1.2.5 (validity), RFC 3279 section 2.3, RFC 5480 and RFC 8410 (keys), X.690 section 8 (DER).
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final

_BLOCK: Final = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0  # [0] EXPLICIT, absent from version 1
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_EC: Final = bytes.fromhex("2a8648ce3d0201")  # 1.2.840.10045.2.1; the others as RFC 3279, 5480 and 8410 name them
_KINDS: Final = {
    bytes.fromhex("2a864886f70d010101"): "RSA",
    bytes.fromhex("2a8648ce3d030107"): "P-256",
    bytes.fromhex("2b81040022"): "P-384",
    bytes.fromhex("2b81040023"): "P-521",
    bytes.fromhex("2b6570"): "Ed25519",
}
_FORMAT: Final = "%Y%m%d%H%M%SZ"


@dataclass(frozen=True, slots=True)
class Validity:
    """Period of validity in seconds since the epoch, both ends included."""

    not_before_unix_s: int
    not_after_unix_s: int

    def holds(self, now_unix_s: float) -> bool:
        """Whether the certificate is valid at that time."""
        return self.not_before_unix_s <= now_unix_s <= self.not_after_unix_s


def certificates(pem: bytes) -> list[bytes]:
    """Certificates of a PEM file as DER, in their order.

    Text between them is skipped. Raises ``ValueError``.
    """
    try:
        return [binascii.a2b_base64(block.strip()) for block in _BLOCK.findall(pem)]
    except binascii.Error as error:
        raise ValueError(f"a certificate in it is damaged ({error})") from None


def validity(der: bytes) -> Validity:
    """Period of validity of one certificate.

    Raises ``ValueError`` for anything else.
    """
    after, end = _validity_at(der)
    start, end = _inside(der, after, end, _SEQUENCE)
    first, after = _time(der, start, end)
    last, _ = _time(der, after, end)
    return Validity(first, last)


def key_kind(der: bytes) -> str:
    """Kind of a certificate's key.

    ``RSA``, ``P-256``, ``P-384``, ``P-521``, ``Ed25519``, else ``of another kind``. Raises ``ValueError`` as ``validity`` does.
    """
    after, end = _validity_at(der)
    for _ in ("validity", "subject"):
        _, _, after = _element(der, after, end)
    start, end = _inside(der, *_inside(der, after, end, _SEQUENCE), _SEQUENCE)
    _, at, after = _element(der, start, end)
    if der[at:after] == _EC:
        _, at, after = _element(der, after, end)  # the curve
    return _KINDS.get(der[at:after], "of another kind")


def _validity_at(der: bytes) -> tuple[int, int]:
    """Position of the validity, and the end of the element that holds it."""
    start, end = _inside(der, *_inside(der, 0, len(der), _SEQUENCE), _SEQUENCE)  # tbsCertificate
    tag, _, after = _element(der, start, end)
    if tag == _VERSION:
        _, _, after = _element(der, after, end)
    for _ in ("signature", "issuer"):  # the serial number was the element before
        _, _, after = _element(der, after, end)
    return after, end


def _time(der: bytes, start: int, end: int) -> tuple[int, int]:
    """Point in time, and the position of the next element."""
    tag, at, after = _element(der, start, end)
    text = der[at:after].decode("ascii", "replace")
    if tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("its validity holds something else than times")
    if tag == _UTC_TIME:  # two digits of the year: 50 to 99 are 19YY there, which is not where Python draws the line
        text = ("19" if text[:1] >= "5" else "20") + text
    moment = datetime.strptime(text, _FORMAT).replace(tzinfo=timezone.utc)
    return int(moment.timestamp()), after


def _inside(der: bytes, start: int, end: int, wanted: int) -> tuple[int, int]:
    """Begin and end of the content of the element at ``start``."""
    tag, at, after = _element(der, start, end)
    if tag != wanted:
        raise ValueError("it is no X.509 certificate")
    return at, after


def _element(der: bytes, start: int, end: int) -> tuple[int, int, int]:
    """Tag of the element at ``start``, and the begin and end of its content.

    ``end``: of the element that holds it.
    """
    if start + 2 > end:
        raise ValueError("a certificate in it is cut short")
    length, at = der[start + 1], start + 2
    if length >= 0x80:
        octets = length & 0x7F
        if not 1 <= octets <= 4 or at + octets > end:
            raise ValueError("it is no X.509 certificate")
        length, at = int.from_bytes(der[at : at + octets], "big"), at + octets
    if at + length > end:
        raise ValueError("a certificate in it is cut short")
    return der[start], at, at + length
