"""Define one row of the table of log lines, and turn its template into a pattern.

A template is the message as the engine's source has it, from its first character on.
``{field}`` stands for a value (``engine_logs/fields.py``), ``{_}`` for text that is skipped.
It is matched at the start of the message text, so the file name and line number of the emitting statement do not count, nor does
text that a client got into the middle of a line.

Standard library only: the logging handler inside the engine uses it too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from handrail.records import LogKind
from handrail_sidecar.engine_logs.fields import NUMBERS, PATTERNS, clipped, quoted_ids, reason_of

KEY_CHARS: Final = 4
"""Literal characters at the start of a template; rows are found by them."""

Fold = tuple[str, ...]
"""Fields whose equal values make lines of one kind one fact with a count."""

REQUEST: Final[Fold] = ("request_id",)
PEER: Final[Fold] = ("peer",)
PEER_ENGINE: Final[Fold] = ("peer_engine_id",)
PROCESS: Final[Fold] = ("process",)
ONCE: Final[Fold] = ()
"""All lines of the row are one fact while they keep coming."""
EACH: Final[Fold] = ("each",)
"""Each line is a fact of its own."""

_SKIP: Final = r".{0,512}?"
_HOLE: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Content of one message; it may name several requests."""

    row: Recogniser
    kind: LogKind
    texts: Mapping[str, str]
    numbers: Mapping[str, float]
    request_ids: tuple[str, ...] = ()
    reason: str | None = None


Reader = Callable[["Line", str], "Line"]
"""Completes a line from the text of the template's ``{rest}``.

It takes only allow-listed parts of that text.
"""


@dataclass(frozen=True, kw_only=True)
class Recogniser:
    """One row of the table.

    ``versions`` and ``level`` record where the wording was seen; neither is matched.
    """

    name: str  # emitter.subject, unique with its wording: "vllm.nixl.expired"
    kind: LogKind
    template: str
    versions: str
    level: str = "ERROR"
    fold: Fold = REQUEST
    reader: Reader | None = None

    @property
    def emitter(self) -> str:
        """The engine or library that logs the line."""
        return self.name.partition(".")[0]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The template as a pattern for ``match``."""
        parts: list[str] = []
        at = 0
        for hole in _HOLE.finditer(self.template):
            name = hole[1]
            parts.append(re.escape(self.template[at : hole.start()]))
            greedy = name == "rest" or self.template[hole.end() : hole.end() + 1] in ("", "{")  # no literal text ends it
            parts.append(_SKIP if name == "_" else f"(?P<{name}>{PATTERNS[name]}{'' if greedy else '?'})")
            at = hole.end()
        parts.append(re.escape(self.template[at:]))
        return re.compile("".join(parts))

    def read(self, message: str) -> Line | None:
        """Return the line when ``message`` matches this row, otherwise None."""
        match = self.pattern.match(message)
        if match is None:
            return None
        texts: dict[str, str] = {}
        numbers: dict[str, float] = {}
        request_ids: tuple[str, ...] = ()
        rest = ""
        for name, value in match.groupdict().items():
            if name == "rest":
                rest = value
            elif name == "request_ids":
                request_ids = quoted_ids(value)
            elif name in NUMBERS:
                numbers[name] = float(value)
            else:
                texts[name] = clipped(value)
        if "request_id" in texts:
            request_ids = (texts.pop("request_id"),)
        line = Line(row=self, kind=self.kind, texts=texts, numbers=numbers, request_ids=request_ids, reason=reason_of(message))
        return line if self.reader is None else self.reader(line, rest)
