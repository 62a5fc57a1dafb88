"""Set up logging of the long-running commands to standard error.

The format is text, or one JSON object a line.
Messages hold names and errors of others, so each stays on one line and is made ``handrail.printable``.
The lines of a traceback are indented, so that none of them looks like an entry.
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
    """Format a line: local time, level, logger, message; then any traceback."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - logging's name
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Format one JSON object a line.

    It holds time (RFC 3339, UTC), level, logger, message, and any traceback.
    """

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
    """Log from INFO on to standard error.

    Call this before grpc is imported, which reads its own setting then.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # grpc's core would write a line for each failed handshake
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
