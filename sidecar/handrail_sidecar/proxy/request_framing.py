"""Read where a request's body ends, and frame it for the upstream.

A body of known length passes as it came. The chunked transfer coding is decoded strictly (RFC 9112 section 7.1). llhttp reads
request heads and responses, but it reports neither where in a read a body ended (the pipelined request behind it needs that)
nor the bytes between chunks. So the proxy decodes these bodies here and sends them on in chunks of its own: odd framing never
leaves the proxy. A property test compares this decoder with llhttp.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 4096
MAX_TRAILER_BYTES = 16384

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\Z")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\Z")
LAST = b"0\r\n"


class BadChunkError(Exception):
    """Broken framing; nothing after it can be trusted."""


class LengthBody:
    """A body of known length.

    ``size``: that length. ``left``: what of it has not come.
    """

    __slots__ = ("left", "size")

    def __init__(self, size: int) -> None:
        self.size = self.left = size

    @property
    def done(self) -> bool:
        return not self.left

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Return the pieces of body in ``data`` and the number of bytes taken."""
        piece = data[: self.left]
        self.left -= len(piece)
        return [piece], len(piece)

    def framed(self, pieces: list[bytes]) -> bytes:
        """``pieces`` as they go to the upstream."""
        return b"".join(pieces)


class ChunkedBody:
    """Decode one chunked body.

    It holds at most one unfinished line and the trailers. It hands out body bytes as they come. ``size``: of those so far.
    """

    __slots__ = ("_in_data", "_left", "_line", "_trailer_bytes", "_trailers", "done", "size")

    def __init__(self) -> None:
        self.size = 0
        self._left = 0  # bytes of the open chunk still to come
        self._in_data = False  # inside a chunk's data or the line end behind it
        self._line = bytearray()
        self._trailers: list[bytes] | None = None  # a list once the last chunk was read
        self._trailer_bytes = 0
        self.done = False

    @property
    def trailers(self) -> bytes:
        """The trailer lines as received, each with its line end."""
        return b"".join(line + b"\r\n" for line in self._trailers or ())

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Return the decoded pieces in ``data`` and the number of bytes taken.

        The number is less than the length of ``data`` only once ``done``. Raises ``BadChunkError``.
        """
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while at < end and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                self.size += len(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            stop = data.find(b"\n", at)
            self._line += data[at : end if stop < 0 else stop + 1]
            if len(self._line) > MAX_LINE_BYTES:
                raise BadChunkError("a chunk size or trailer line is too long")
            if stop < 0:
                at = end
                break
            at = stop + 1
            if not self._line.endswith(b"\r\n"):
                raise BadChunkError("a chunk size or trailer line ends with a bare line feed")
            line = bytes(self._line[:-2])
            self._line.clear()
            self._take(line)
        return pieces, at

    def framed(self, pieces: list[bytes]) -> bytes:
        """``pieces`` as they go to the upstream, in chunks of our own.

        After the last of them the end, with its trailers.
        """
        out = [encode(piece) for piece in pieces]
        if self.done:
            out += (LAST, self.trailers, b"\r\n")
        return b"".join(out)

    def _take(self, line: bytes) -> None:
        if self._trailers is not None:
            if not line:
                self.done = True
            elif _TRAILER.match(line) is None:
                raise BadChunkError("a trailer line is malformed")
            else:
                self._trailer_bytes += len(line)
                if self._trailer_bytes > MAX_TRAILER_BYTES:
                    raise BadChunkError("the trailers are too long")
                self._trailers.append(line)
        elif self._in_data:
            if line:
                raise BadChunkError("a chunk's data is longer than its size")
            self._in_data = False
        else:
            found = _SIZE.match(line)
            if found is None:
                raise BadChunkError("a chunk size is malformed")
            self._left = int(found[1], 16)
            if self._left:
                self._in_data = True
            else:
                self._trailers = []


def encode(piece: bytes) -> bytes:
    """Encode ``piece``, which must not be empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)
