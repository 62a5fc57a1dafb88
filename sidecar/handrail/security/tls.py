"""TLS of a process's listeners and clients, from files that may change any time.

At every handshake, a listener's context takes its certificate from the current files (OpenSSL's server name callback, which is
called without a server name too). So a whole new generation is in use from one handshake to the next: certificate, key and the
authorities of clients together. Existing connections stay.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from handrail.security.certificates import certificates, key_kind, validity_unix_s
from handrail.security.file_reload import Contents, ReloadingFile

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

CERT, KEY, CLIENT_CA, CA = "cert_file", "key_file", "client_ca_file", "ca_file"
_KINDS: Final = ("RSA", "P-256", "P-384")  # tried with grpcio 1.85
_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "EE_KEY_TOO_SMALL": "the certificate's key is too short to be accepted: RSA of 2048 bits, or ECDSA",
    "CA_MD_TOO_WEAK": "the certificate's signature is too weak to be accepted: SHA-256 or better",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """TLS objects from one generation of the files.

    ``expiries``: end of validity by use, in seconds since the epoch.
    """

    context: ssl.SSLContext
    cert: bytes | None = None  # PEM, the whole chain
    key: bytes | None = None
    authorities: bytes | None = None  # PEM: of clients at a server, of servers at a client
    expiries: Mapping[str, int]


class ServerTls:
    """TLS of every listener of this process.

    ``prefix``: of the settings, for messages. Raises ``OSError`` for a file that cannot be read, ``ValueError`` for one that
    holds no usable certificate, key or authority.
    """

    def __init__(
        self,
        cert_file: Path,
        key_file: Path,
        client_ca_file: Path | None = None,
        *,
        prefix: str = "tls.",
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.wants_clients = client_ca_file is not None
        files = {f"{prefix}{CERT}": cert_file, f"{prefix}{KEY}": key_file}
        if client_ca_file is not None:
            files[f"{prefix}{CLIENT_CA}"] = client_ca_file
        maker = _Maker(files, prefix, ssl.Purpose.CLIENT_AUTH, now_unix_s)
        self.identity: ReloadingFile[TlsMaterial] = ReloadingFile("server", files, maker, secrets=frozenset({f"{prefix}{KEY}"}))

    def context(self, *, ask_only: bool = False) -> ssl.SSLContext:
        """Context for one listener, which stays valid when the files change.

        Where authorities of clients are set, the handshake requires a client certificate. With ``ask_only`` a client that has
        none may pass, for the listener to decide, while one with a wrong certificate may not.
        """
        context = _bare_context(ssl.Purpose.CLIENT_AUTH)
        context.num_tickets = 0  # a resumed session would not check its client's certificate again
        context.options |= ssl.OP_NO_TICKET
        if self.wants_clients:
            context.verify_mode = ssl.CERT_OPTIONAL if ask_only else ssl.CERT_REQUIRED

        def take_newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.identity.value.context

        context.sni_callback = take_newest
        return context


def client_identity(
    ca_file: Path | None,
    cert_file: Path | None,
    key_file: Path | None,
    *,
    use: str,
    prefix: str = "",
    now_unix_s: Callable[[], float] = time.time,
) -> ReloadingFile[TlsMaterial]:
    """TLS of this process as a client: trust in the server, and its own certificate.

    Without ``ca_file`` the system's authorities count. Raises as ``ServerTls`` does.
    """
    given = {CA: ca_file, CERT: cert_file, KEY: key_file}
    files = {f"{prefix}{name}": path for name, path in given.items() if path is not None}
    maker = _Maker(files, prefix, ssl.Purpose.SERVER_AUTH, now_unix_s, use)
    return ReloadingFile(use, files, maker, secrets=frozenset({f"{prefix}{KEY}"}))


class _Maker:
    """Make an identity from the files' content.

    A certificate that is not valid now is not taken while the former one is.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        prefix: str,
        purpose: ssl.Purpose,
        now_unix_s: Callable[[], float],
        use: str = "server",
    ) -> None:
        self._files = files
        self._purpose = purpose
        self._now_unix_s = now_unix_s
        self._cert, self._key = f"{prefix}{CERT}", f"{prefix}{KEY}"
        serves = purpose is ssl.Purpose.CLIENT_AUTH
        self._authorities = f"{prefix}{CLIENT_CA if serves else CA}"
        self._use, self._authorities_use = use, "client_ca" if serves else f"{use}_ca"
        self._former: Certificate | None = None

    def __call__(self, contents: Contents) -> TlsMaterial:
        context = _bare_context(self._purpose)
        expiries: dict[str, int] = {}
        authorities = contents.get(self._authorities)
        if authorities is not None:
            roots = self._certificates(self._authorities, authorities)
            expiries[self._authorities_use] = _first_end(roots)
            context.load_verify_locations(cadata=b"".join(map(_der, roots)))
            if self._purpose is ssl.Purpose.CLIENT_AUTH:
                # The listener's own context decides whether it is required; without this one Python shows no peer's certificate.
                context.verify_mode = ssl.CERT_OPTIONAL
        elif self._purpose is ssl.Purpose.SERVER_AUTH:
            context.load_default_certs(self._purpose)
        cert, key = contents.get(self._cert), contents.get(self._key)
        if cert is not None and key is not None:
            chain = self._certificates(self._cert, cert)
            self._mind_kind(key_kind(chain[0]))
            self._load_chain(context, key)
            self._mind_dates(chain[0])
            expiries[self._use] = _first_end(chain)
            self._former = chain[0]
        return TlsMaterial(context=context, cert=cert, key=key, authorities=authorities, expiries=expiries)

    def _certificates(self, setting: str, pem: bytes) -> list[Certificate]:
        """Every certificate in the file; at least one."""
        path = self._files[setting]
        try:
            found = certificates(pem)
        except ValueError as error:
            raise ValueError(f"{setting}: {path}: {error}") from None
        if not found:
            raise ValueError(f"{setting}: {path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
        return found

    def _load_chain(self, context: ssl.SSLContext, key: bytes) -> None:
        cert_path, key_path = self._files[self._cert], self._files[self._key]
        if b"ENCRYPTED" in key:
            raise ValueError(
                f"{self._key}: {key_path} is encrypted, and nobody can enter a passphrase; decrypt it: "
                "openssl pkey -in OLD -out NEW"
            )
        if b"PRIVATE KEY-----" not in key:
            raise ValueError(f"{self._key}: {key_path} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)")
        try:
            context.load_cert_chain(cert_path, key_path, password="")
        except ssl.SSLError as error:
            why = _REASONS.get(error.reason or "", f"{error.reason or error}")
            raise ValueError(f"{self._cert}: {cert_path} with {self._key}: {key_path}: {why}") from None

    def _mind_kind(self, kind: str) -> None:
        if kind not in _KINDS:  # gRPC would start with it, and then fail every handshake without a message
            rule = f"its key is {kind}, which gRPC does not support; use RSA, or ECDSA with {' or '.join(_KINDS[1:])}"
            raise ValueError(f"{self._cert}: {self._files[self._cert]}: {rule}")

    def _mind_dates(self, certificate: Certificate) -> None:
        now, former = self._now_unix_s(), self._former
        if _valid_at(certificate, now):
            return
        begins, ends = validity_unix_s(certificate)
        text = f"ended on {_day(ends)}" if ends < now else f"begins on {_day(begins)}"
        problem = f"{self._cert}: {self._files[self._cert]} {text}"
        if former is not None and _valid_at(former, now):
            raise ValueError(f"{problem}; the one in use stays, it is valid")
        log.warning("%s: peers will refuse it; give a certificate that is valid now", problem)


def _bare_context(purpose: ssl.Purpose) -> ssl.SSLContext:
    """Context without certificates and authorities.

    TLS 1.2 or later, with the strong ciphers that Python has chosen.
    """
    serves = purpose is ssl.Purpose.CLIENT_AUTH
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _valid_at(certificate: Certificate, unix_s: float) -> bool:
    begins, ends = validity_unix_s(certificate)
    return begins <= unix_s <= ends


def _first_end(chain: Sequence[Certificate]) -> int:
    return min(validity_unix_s(each)[1] for each in chain)


def _der(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _day(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).date().isoformat()
