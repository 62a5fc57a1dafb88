"""Certificates for tests, from the test's own authority, and their files.

Files are replaced as an operator or Kubernetes replaces them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import trustme

DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file's content with ``content`` in one step."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.chmod(mode)
    beside.replace(path)


@dataclass
class Files:
    """One certificate and its key on disk."""

    cert: Path
    key: Path

    def put(self, leaf: trustme.LeafCert) -> None:
        """Write the key first: for a moment the two do not match."""
        replace(self.key, leaf.private_key_pem.bytes())
        replace(self.cert, b"".join(pem.bytes() for pem in leaf.cert_chain_pems), 0o644)


class Authority:
    """Issues certificates and writes them below ``folder``."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.pem)

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def leaf(self, *names: str, begins: datetime | None = None, ends: datetime | None = None) -> trustme.LeafCert:
        """Issue a certificate for ``names``; by default for this host's loopback."""
        return self.ca.issue_cert(*(names or ("localhost", "127.0.0.1", "::1")), not_before=begins, not_after=ends)

    def files(self, stem: str, leaf: trustme.LeafCert | None = None) -> Files:
        made = Files(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        made.put(leaf if leaf is not None else self.leaf())
        return made


def turn_link(link: Path, target: Path) -> None:
    """Replace files as Kubernetes replaces a mounted secret.

    It renames the link ``..data`` over the former one.
    """
    beside = link.with_name(f"{link.name}.tmp")
    os.symlink(target.name, beside)
    beside.replace(link)
