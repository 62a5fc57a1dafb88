"""Check the head of an HTTP/1.x request; change at most two of its header lines.

llhttp checks the head; the bytes stay as they came in.
A head that two parsers could read differently opens the door to request smuggling (RFC 9112 section 11.2), so nothing is
lenient here: llhttp 9's defaults refuse bare line feeds, folded lines, spaces before colons, both or two lengths, and unknown
transfer codings.
"""

from __future__ import annotations

from dataclasses import dataclass

import httptools

END = b"\r\n\r\n"
_CUT = b"\r"  # this may become an empty line
_OWNED = (b"traceparent:",)


class MalformedHeadError(Exception):
    """Not an HTTP/1.x request that may be passed on.

    The text gives the reason and repeats nothing of the request.
    """


class HeadTooLongError(Exception):
    """No end of the head within the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """One request head.

    ``raw``: as received, blank line included. Header names and values are bytes, in order, in any case.
    ``last``: the client sends no further request on this connection, so the end of the answer ends it (RFC 9112 section 9.3).
    """

    raw: bytes
    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    content_length: int | None  # None: no such header
    chunked: bool
    last: bool = False

    def first(self, name: bytes) -> bytes | None:
        """Value of the first header called ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key.lower() == name:
                return value
        return None

    @property
    def path(self) -> str:
        """Path without query, also of an absolute-form target; ``*`` stays ``*``."""
        text = self.target.decode("latin-1").partition("?")[0]
        _, absolute, rest = text.partition("://")
        # Not urlsplit: it raises for hosts in odd brackets, which llhttp lets pass.
        return f"/{rest.partition('/')[2]}" if absolute and not text.startswith("/") else text


class _ParserCallbacks:
    """Callbacks for llhttp."""

    __slots__ = ("complete", "headers", "target")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.target = b""
        self.complete = False

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_head(raw: bytes) -> RequestHead:
    """Parse ``raw``, which ends with the first blank line.

    Raises ``BadRequestError``.
    """
    seen = _ParserCallbacks()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # Upgrade and CONNECT: the head is whole, the caller handles what follows
    except httptools.HttpParserError as error:
        raise MalformedHeadError(str(error)) from error
    if not seen.complete:
        raise MalformedHeadError("the request's head does not end at its blank line")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise MalformedHeadError(f"HTTP/{version} is not supported")
    length, codings, options = None, [], set[bytes]()
    for name, value in seen.headers:
        lowered = name.lower()
        if lowered == b"content-length":
            length = int(value)  # llhttp took digits only, and only one such header
        elif lowered == b"transfer-encoding":
            codings.append(value.lower())
        elif lowered == b"connection":
            options.update(option.strip() for option in value.lower().split(b","))
    if codings and version == "1.0":
        raise MalformedHeadError("Transfer-Encoding in an HTTP/1.0 request")
    return RequestHead(
        raw=raw,
        method=parser.get_method(),
        target=seen.target,
        headers=tuple(seen.headers),
        content_length=length,
        chunked=bool(codings),  # llhttp refuses a request whose last coding is another one
        last=b"close" in options or (version == "1.0" and b"keep-alive" not in options),
    )


def rewrite(head: RequestHead, *, traceparent: bytes | None, request_id: bytes | None) -> bytes:
    """Return the head to send upstream.

    ``traceparent`` replaces all lines of that name; None changes nothing. ``request_id`` is appended.
    Everything else keeps its bytes, order, case and duplicates.
    """
    if traceparent is None and request_id is None:
        return head.raw
    lines = head.raw[: -len(END)].split(b"\r\n")
    if traceparent is not None:
        lines = [line for line in lines if not line[:12].lower().startswith(_OWNED)]
        lines.append(b"traceparent: " + traceparent)
    if request_id is not None:
        lines.append(b"X-Request-Id: " + request_id)
    return b"\r\n".join(lines) + END


class HeadReader:
    """Takes the next head out of a growing buffer, wherever the reads were cut.

    It drops empty lines before a request line (RFC 9112 section 2.2). Each must be a whole CRLF: a bare line feed ends no line.
    """

    __slots__ = ("_limit", "_probe", "_scanned")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._probe: HeadProbe | None = None
        self._scanned = 0  # bytes of the buffer that the probe has seen

    def take(self, pending: bytearray) -> RequestHead | None:
        """Remove a whole head from the front of ``pending`` and return it.

        Returns None until the head is whole. Between two heads ``pending`` may only grow.
        Raises ``BadRequestError`` and ``HeadTooLongError``, once.
        """
        if not self._scanned:
            drop_empty_lines(pending)
            if not pending or pending.startswith(_CUT):
                return None
        end = pending.find(END, max(0, self._scanned - len(END)))
        if end < 0:
            if len(pending) > self._limit:
                raise HeadTooLongError
            if self._probe is None:
                self._probe = HeadProbe()
            self._probe.feed(bytes(pending[self._scanned :]))
            self._scanned = len(pending)
            return None
        self._probe, self._scanned = None, 0
        if end + len(END) > self._limit:
            raise HeadTooLongError
        raw = bytes(pending[: end + len(END)])
        del pending[: len(raw)]
        return parse_head(raw)


def drop_empty_lines(pending: bytearray) -> None:
    """Remove whole empty lines from the front.

    The first half of one may be left. Raises ``BadRequestError`` for bare line ends.
    """
    while pending.startswith(b"\r\n"):
        del pending[:2]
    if pending.startswith(b"\n") or (len(pending) > len(_CUT) and pending.startswith(_CUT)):
        raise MalformedHeadError("an empty line before the request line is not CRLF")


class HeadProbe:
    """Check a head that has not come in whole yet.

    It refuses at once what can never become HTTP, instead of at the size limit.
    """

    __slots__ = ("_parser",)

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(_ParserCallbacks())

    def feed(self, data: bytes) -> None:
        """Check the next bytes. Raises ``BadRequestError``."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise MalformedHeadError(str(error)) from error
