"""Logging of the long-running commands: to standard error, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import os

from handrail.times import format_rfc3339


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": format_rfc3339(int(record.created * 1000) * 10**6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def start_logging(*, as_json: bool) -> None:
    """Log from INFO on to standard error. Call it before grpc is imported, which reads its own setting then."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would write a line for each handshake that fails
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
