"""Split a server-sent event stream into its events.

It is the parser of the WHATWG HTML standard, section 9.2.6, on bytes.
Lines end in CR, LF or CRLF; a BOM may come first; several ``data`` lines make one event; comments, ids and retry times are
skipped; an event that no empty line completed is none. Bytes are not decoded: the reader of the data does that, so a character
split across reads needs no care here.
"""

from __future__ import annotations

from typing import Final

EVENT_LIMIT_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
_LF: Final = 0x0A

Event = tuple[bytes, bytes | None]
"""Event name (empty without one) and data.

The data is None for an event above the limit, which was not kept.
"""


class SseParser:
    """Parser that takes reads and returns events.

    It holds at most ``limit_bytes`` and one read.
    """

    def __init__(self, limit_bytes: int = EVENT_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._begun = False  # past the place of a possible BOM
        self._after_cr = False
        self._partial = bytearray()  # a line without its end yet
        self._overlong = False  # the line is longer than the limit; its rest is skipped
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0
        self._oversize = False

    @property
    def between_events(self) -> bool:
        """Whether nothing is pending.

        A read that holds whole events may then be read without this parser.
        """
        return self._begun and not (
            self._partial or self._data or self._name or self._oversize or self._overlong or self._after_cr
        )

    def push(self, data: bytes) -> list[Event]:
        """The events that this read completes, in order."""
        if not self._begun:
            data = self._without_bom(data)
            if not self._begun:
                return []
        events: list[Event] = []
        size, at = len(data), 0
        if self._after_cr and size:
            self._after_cr = False
            at = 1 if data[0] == _LF else 0
        lf, cr = data.find(b"\n", at), data.find(b"\r", at)
        while lf >= 0 or cr >= 0:
            if cr < 0 or 0 <= lf < cr:
                end, after = lf, lf + 1
            else:
                end, after = cr, cr + 1
                if after == size:
                    self._after_cr = True
                elif data[after] == _LF:
                    after += 1
            self._line(self._completed(data[at:end]), events)
            at = after
            if 0 <= lf < at:
                lf = data.find(b"\n", at)
            if 0 <= cr < at:
                cr = data.find(b"\r", at)
        if at < size:
            self._keep(data[at:] if at else data)
        return events

    def _without_bom(self, data: bytes) -> bytes:
        data = bytes(self._partial) + data
        if len(data) < len(_BOM) and _BOM.startswith(data):
            self._partial[:] = data
            return b""
        self._partial.clear()
        self._begun = True
        return data.removeprefix(_BOM)

    def _keep(self, rest: bytes) -> None:
        if self._overlong:
            return
        self._partial += rest
        if len(self._partial) > self._limit:
            self._overlong = True
            del self._partial[1:]  # the first byte still identifies a comment

    def _completed(self, rest: bytes) -> bytes:
        """The whole line; of a line that is too long, its first byte.

        The event of such a line is marked, unless the line is a comment.
        """
        if not self._partial:
            return rest
        self._keep(rest)
        line = bytes(self._partial)
        self._partial.clear()
        if self._overlong:
            self._overlong = False
            self._oversize = self._oversize or line != b":"
        return line

    def _line(self, line: bytes, events: list[Event]) -> None:
        if line.startswith(b"data:"):
            self._append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line:
            self._dispatch(events)
        elif line.startswith(b"event:"):
            self._name = line[6:].removeprefix(b" ")
        elif line == b"data":
            self._append(b"")
        elif line == b"event":
            self._name = b""

    def _append(self, value: bytes) -> None:
        self._size += len(value)
        if self._size > self._limit:
            self._oversize = True
            self._data.clear()
            return
        # Empty lines cost no bytes but a place each, so they count as one byte against the limit.
        self._size += 1
        self._data.append(value)

    def _dispatch(self, events: list[Event]) -> None:
        if self._oversize:
            events.append((self._name, None))
        elif self._data:
            events.append((self._name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
        self._name, self._size, self._oversize = b"", 0, False
        self._data.clear()
