"""Security between our clients and one peer: certificates, token, trust state.

One object per peer is shared by all its clients, so that trouble is logged once.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from handrail.otlp.endpoint import Endpoint
from handrail.otlp.settings import ClientSettings, File
from handrail.otlp.signals import AuthFailed, Unauthorized
from handrail.security.file_reload import ReloadingFile
from handrail.security.tls import TlsMaterial, client_identity
from handrail.security.tokens import AUTHORIZATION, bearer, tokens


class ClientSecurity:
    """Certificates and token for one peer, and whether it accepts them.

    ``use``: the peer's kind, in metrics.
    Raises ``OSError`` for a file that cannot be read, ``ValueError`` for one that cannot be used.
    """

    def __init__(self, endpoint: Endpoint, settings: ClientSettings, *, use: str = "peer") -> None:
        self.names = settings.names
        prefix = self.names.prefix
        self._identity: ReloadingFile[TlsMaterial] | None = None
        if endpoint.secure:
            self._identity = client_identity(
                _path(settings.ca_file), _path(settings.cert_file), _path(settings.key_file), use=use, prefix=prefix
            )
        self._token: ReloadingFile[tuple[str, ...]] | None = None
        if settings.token_file is not None:
            self._token = tokens(Path(settings.token_file), use=f"{use}_token", setting=f"{prefix}token_file")
        self._trouble: type[AuthFailed] | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._credentials_of: TlsMaterial | None = None

    @property
    def watched(self) -> list[ReloadingFile[Any]]:
        """Files to watch for changes."""
        return [each for each in (self._identity, self._token) if each is not None]

    @property
    def context(self) -> ssl.SSLContext | None:
        """TLS context for HTTP, a new object after a change. None for plaintext."""
        return self._identity.value.context if self._identity is not None else None

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for gRPC, a new object after a change. None for plaintext."""
        if self._identity is None:
            return None
        identity = self._identity.value
        if self._credentials is None or identity is not self._credentials_of:
            # gRPC brings roots of its own; an operator sets up the system's, so they are used where there are some.
            roots = identity.authorities or _system_roots()
            self._credentials = grpc.ssl_channel_credentials(roots, identity.key, identity.cert)
            self._credentials_of = identity
        return self._credentials

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {AUTHORIZATION: bearer(self._token.value[0])} if self._token is not None else {}

    def troubled(self, refusal: AuthFailed) -> bool:
        """Note a failed authentication; True where it is new, or has another cause."""
        news = type(refusal) is not self._trouble
        self._trouble = type(refusal)
        return news

    def settled(self) -> bool:
        """Note a successful authentication; True where the last one failed."""
        news, self._trouble = self._trouble is not None, None
        return news

    def remedy(self, refusal: AuthFailed) -> str:
        """Instruction to the operator for this refusal."""
        names = self.names
        if isinstance(refusal, Unauthorized):
            token = names.of("token_file") or names.of("headers")
            return f"set a token that it accepts: {token}" if token else "no setting holds a token here"
        authorities = names.of("ca_file") or "the system's authorities (or the file that SSL_CERT_FILE names)"
        mine = names.of("cert_file")
        shown = f"; {mine} must be a certificate that it accepts, if it requires one" if mine else ""
        return (
            f"{authorities} must contain the authority that signed its certificate, and the certificate must name "
            f"the endpoint's host{shown}"
        )


def _path(file: File) -> Path | None:
    return None if file is None else Path(file)


def _system_roots() -> bytes | None:
    path = ssl.get_default_verify_paths().cafile  # None where that file does not exist
    return None if path is None else Path(path).read_bytes()
