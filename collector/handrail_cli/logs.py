"""Logging of the long-running commands: to standard error, as text or as one JSON object a line.

Messages hold names and errors of others: they stand on one line and as ``handrail.printable`` lets them. A traceback has lines
of its own; they are set in, so that none of them can be taken for an entry.
"""

from __future__ import annotations

import json
import logging
import os
from types import TracebackType
from typing import Final

from handrail.durations import format_rfc3339
from handrail.printable import printable, printable_lines

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """A line: local time, level, logger, message; below it the traceback where there is one."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - logging's name
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": format_rfc3339(int(record.created * 1000) * 10**6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = printable_lines(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def start_logging(*, as_json: bool) -> None:
    """Log from INFO on to standard error. Call it before grpc is imported, which reads its own setting then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would write a line for each handshake that fails
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
