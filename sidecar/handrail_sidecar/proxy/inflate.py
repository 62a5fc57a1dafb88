"""Decompress a copy of a response body for reading.

The client gets the body as it came. ``gzip`` (RFC 1952, also several members in a row) and ``deflate`` (RFC 1950, and the bare
RFC 1951 streams that some servers send) are decoded. A body in any other encoding is not read at all.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

OUTPUT_LIMIT_BYTES: Final = 8 << 20  # most bytes decoded from one read; a read is at most a few hundred KiB
_MAGIC: Final = b"\x1f\x8b"
_GZIP: Final = 16 + zlib.MAX_WBITS
_ZLIB: Final = zlib.MAX_WBITS
_BARE: Final = -zlib.MAX_WBITS


class UndecodableError(Exception):
    """A body that cannot be read, or cannot be read any further."""


class Plain:
    """Reader for a body without encoding."""

    def push(self, data: bytes) -> bytes:
        return data


class Inflate:
    """Reader for gzip or deflate, one read at a time, with bounded output."""

    def __init__(self, gzip: bool) -> None:
        self._gzip = gzip
        self._stream: Any = None  # None: before the first member and between members
        self._head = b""  # the first byte of a member, until the second identifies it
        self._members = 0
        self._over = False

    def push(self, data: bytes) -> bytes:
        """Decompress one read.

        Raises ``UndecodableError`` for broken data and above ``OUTPUT_LIMIT_BYTES`` of output.
        """
        out = bytearray()
        while data and not self._over:
            if self._stream is None:
                data, self._head = self._head + data, b""
                if len(data) < 2:
                    self._head = data
                    break
                self._open(data)
            if not self._over:
                data = self._inflated(data, out)
        return bytes(out)

    def _open(self, data: bytes) -> None:
        if self._members and not (self._gzip and data.startswith(_MAGIC)):
            self._over = True  # padding or garbage after the end
        elif self._gzip:
            self._stream = zlib.decompressobj(_GZIP)
        else:
            # RFC 1950: the low four bits are 8 and the first two bytes divide by 31; anything else is a bare stream.
            header = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
            self._stream = zlib.decompressobj(_ZLIB if header else _BARE)
        self._members += 1

    def _inflated(self, data: bytes, out: bytearray) -> bytes:
        """Decode into ``out``; return what is left for the next member."""
        while True:
            try:
                out += self._stream.decompress(data, OUTPUT_LIMIT_BYTES - len(out) + 1)
            except zlib.error as error:
                raise UndecodableError from error
            if len(out) > OUTPUT_LIMIT_BYTES:
                raise UndecodableError
            if self._stream.eof:
                rest = bytes(self._stream.unused_data)
                self._stream = None
                return rest
            data = self._stream.unconsumed_tail
            if not data:
                return b""


def decoder(content_encoding: str | None) -> Plain | Inflate | None:
    """Reader for a Content-Encoding header; None for an encoding that cannot be read."""
    names = [name.strip().lower() for name in (content_encoding or "").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return Plain()
    if names in (["gzip"], ["x-gzip"]):
        return Inflate(gzip=True)
    return Inflate(gzip=False) if names == ["deflate"] else None
