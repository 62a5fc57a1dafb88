"""Find the end and the body of a response in a copy of its bytes.

The bytes themselves go to the client untouched. llhttp does the reading. It is lenient here, unlike for requests: connections
are paired, so a response that client and proxy read differently can reach no other client, and a lenient observer can read
what real servers send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import httptools

Headers = Sequence[tuple[bytes, bytes]]
Body = Callable[[bytes, int], None]
"""Takes decoded body bytes and the stamp of the read that they came in.

Chunk framing is removed.
"""


class ResponseWatch:
    """Follow one response from its first interim head to its last byte.

    ``on_head`` is called once, with status and headers of the final head. What it returns gets the body; None: the body is not
    read.
    """

    __slots__ = (
        "_body",
        "_head_only",
        "_headers",
        "_on_head",
        "_parser",
        "_stamp_ns",
        "complete",
        "status",
        "unreadable",
        "until_close",
        "upgraded",
    )

    def __init__(self, head_only: bool, on_head: Callable[[int, Headers], Body | None]) -> None:
        self._head_only = head_only  # a response to HEAD: its length says nothing about the bytes that follow
        self._on_head = on_head
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: Body | None = None
        self._stamp_ns = 0
        self.status: int | None = None  # of the final head
        self.complete = False
        self.until_close = False  # only the end of the connection ends this body
        self.upgraded = False  # 101: what follows is another protocol
        self.unreadable = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_chunked_length=True,
            lenient_transfer_encoding=True,
            lenient_optional_lf_after_cr=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )

    def feed(self, data: bytes, stamp_ns: int) -> bool:
        """Read the next bytes; True once ``complete``, ``upgraded`` or ``unreadable`` is.

        It never raises, whatever the bytes are.
        """
        self._stamp_ns = stamp_ns
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # on_headers_complete saw the 101
        except httptools.HttpParserError:
            # The caller handles bytes behind a complete response.
            self.unreadable = not (self.complete or self.upgraded)
        return self.complete or self.upgraded or self.unreadable

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200 and status != 101:
            return  # interim (100, 102, 103): the final head follows
        self.status = status
        self.upgraded = status == 101
        if self._head_only or self.upgraded or status in (204, 304):
            self.complete = not self.upgraded
        else:
            self.until_close = _until_close(headers)
        self._body = self._on_head(status, headers)

    def on_body(self, body: bytes) -> None:
        if self._body is not None and not self.complete:
            self._body(body, self._stamp_ns)

    def on_message_complete(self) -> None:
        if self.status is not None and not self.upgraded:
            self.complete = True


def _until_close(headers: Headers) -> bool:
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings:
        return not codings[-1].endswith(b"chunked")
    return all(name != b"content-length" for name, _ in headers)
