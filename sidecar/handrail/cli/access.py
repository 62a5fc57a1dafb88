"""How a command is let in by a collector's API: certificates and a token, by flag or by the environment."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Final

from handrail.auth import AUTHORIZATION, Access, bearer, tokens
from handrail.cli.failure import EXIT_USAGE, CliError
from handrail.tls import client_identity

# flag's destination: variable, help
_FILES: Final = {
    "ca_file": (
        "HANDRAIL_API_CA_FILE",
        "authorities that an https:// collector's certificate is checked by (default: the system's)",
    ),
    "cert_file": ("HANDRAIL_API_CERT_FILE", "certificate to show to the collector"),
    "key_file": ("HANDRAIL_API_KEY_FILE", "its private key"),
    "token_file": ("HANDRAIL_API_TOKEN_FILE", "file with the collector's bearer token"),
}


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """``--ca-file``, ``--cert-file``, ``--key-file``, ``--token-file``."""
    group = parser.add_argument_group("being let in by a collector (docs/security.md)")
    for name, (variable, text) in _FILES.items():
        group.add_argument(_flag(name), metavar="FILE", type=Path, help=f"{text}; or ${variable}")


def access(arguments: argparse.Namespace, url: str) -> Access:
    """What flags and environment say for ``url``; the flag wins. Raises ``CliError`` for files that cannot be used."""
    files = {name: _given(arguments, name) for name in _FILES}
    ca, cert, key, token = files.values()
    if (cert is None) != (key is None):
        raise CliError(what="--cert-file and --key-file belong together", valid="both, or neither", exit_code=EXIT_USAGE)
    try:
        context = None
        if url.startswith("https://"):
            context = client_identity(ca, cert, key, use="collector").value.context
        headers = {}
        if token is not None:
            headers[AUTHORIZATION] = bearer(tokens(token, use="collector_token", setting=_flag("token_file")).value[0])
    except (OSError, ValueError) as error:
        raise CliError(what=str(error), valid="readable files in PEM; see docs/security.md", exit_code=EXIT_USAGE) from None
    return Access(context, headers)


def access_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The flags of access as they were given, for a command line that is shown."""
    given = {name: getattr(arguments, name, None) for name in _FILES}
    return tuple(word for name, path in given.items() if path is not None for word in (_flag(name), str(path)))


def _given(arguments: argparse.Namespace, name: str) -> Path | None:
    path: Path | None = getattr(arguments, name, None)
    told = os.environ.get(_FILES[name][0])
    return path if path is not None else Path(told) if told else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
