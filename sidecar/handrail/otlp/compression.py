"""Content encodings of OTLP/HTTP: ``gzip`` and ``deflate`` in, ``gzip`` out.

Source: RFC 9110 section 8.4.1, RFC 1950 to 1952.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Final

from handrail.otlp.errors import TooLarge, Unsupported
from handrail.otlp.signals import Rejected

IDENTITY: Final = ("", "identity")
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_MAX_MEMBERS = 16  # each one copies all bytes after it: millions of empty ones would take minutes
_LEVEL = 1  # spans shrink 5 to 10 times already; level 6 costs four times the CPU for a tenth of the bytes


def inflate(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress ``body``; memory stays near ``limit_bytes`` whatever it claims.

    ``encoding``: the Content-Encoding header, in any case; '' means none. Raises ``Unsupported`` for an unknown one, ``TooLarge``
    when the result would be over ``limit_bytes``, ``Rejected`` when the stream is damaged or cut short.
    """
    name = encoding.strip().lower()
    if name in IDENTITY:
        if len(body) > limit_bytes:
            raise TooLarge(f"the body has {len(body)} bytes; at most {limit_bytes} are taken")
        return body
    if name in ("gzip", "x-gzip"):
        return _members(body, limit_bytes)
    if name == "deflate":
        # RFC 9110 means zlib by "deflate"; some senders leave the zlib header out.
        zlib_header = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
        data, rest = _stream(body, zlib.MAX_WBITS if zlib_header else -zlib.MAX_WBITS, limit_bytes)
        if rest:
            raise Rejected("bytes after the end of the deflate stream")
        return data
    raise Unsupported(f"content encoding {name[:40]!r} is not known; valid: gzip, deflate, identity")


def _members(body: bytes, limit_bytes: int) -> bytes:
    """Decompress a gzip file: one or more members, one after the other."""
    data, rest = _stream(body, _GZIP_WBITS, limit_bytes)
    if not rest:
        return data
    parts, size = [data], len(data)
    while rest:
        if len(parts) == _MAX_MEMBERS:
            raise Rejected(f"the gzip body has more than {_MAX_MEMBERS} members")
        data, rest = _stream(rest, _GZIP_WBITS, limit_bytes - size)
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def _stream(body: bytes, wbits: int, limit_bytes: int) -> tuple[bytes, bytes]:
    decoder = zlib.decompressobj(wbits)
    try:
        # One byte above the bound tells "over it" from "exactly it"; a max_length of 0 would mean no bound at all.
        data = decoder.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise Rejected(f"the compressed body is damaged ({error})") from None
    if len(data) > limit_bytes:
        raise TooLarge(f"the body decompresses to more than {limit_bytes} bytes")
    if not decoder.eof:
        raise Rejected("the compressed body is cut short")
    return data, decoder.unused_data


def deflate(body: bytes) -> bytes:
    """Compress ``body`` as gzip, the one encoding that every OTLP receiver must take."""
    return gzip.compress(body, compresslevel=_LEVEL, mtime=0)
