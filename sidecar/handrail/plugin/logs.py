"""A handler on the engine's own logger, so that no log file is needed: warnings and worse, as the line that was logged.

What the lines mean is the sidecar's business (engine_logs/lines.py). Nothing is formatted that the engine would not format as
well. Two
things are understood here, since the process may be killed before it could be told later: that it was told to end, and that it
failed. vLLM 0.32 kills its core right after the signal, so that no hook of the core would be called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from handrail.plugin.events import MAX_LINE_CHARS
from handrail.plugin.recorder import Recorder

LOGGER: Final = "vllm"
LINES_A_SECOND: Final = 200
SHUTDOWN_LINES: Final = ("[shutdown] API server: shutdown triggered", "[shutdown] EngineCore: trigger received signal=")
FAILED: Final = ("EngineCore encountered a fatal error", "EngineCore failed to start", "WorkerProc failed")
CORE_FAILED: Final = "[shutdown] MPClient: engine core exited unexpectedly"
"""As vLLM 0.32 words them; where it says it in other words, its end reads as a death."""


class GuestHandler(logging.Handler):
    """Hands lines to the recorder; more than ``LINES_A_SECOND`` are counted as lost."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._recorder = recorder
        self._clock = clock
        self._second = -1
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            statement = record.msg
            if isinstance(statement, str) and statement.startswith(SHUTDOWN_LINES):
                self._recorder.say_stopping()
            if record.levelno < logging.WARNING:
                return
            if record.exc_info is not None or (isinstance(statement, str) and statement.startswith(CORE_FAILED)):
                self._recorder.fault_logged()
            if isinstance(statement, str) and statement.startswith(FAILED):
                self._recorder.say_stopping()  # its parent may kill it before it has cleaned up
            second = int(self._clock())
            if second != self._second:
                self._second, self._count = second, 0
            self._count += 1
            if self._count > LINES_A_SECOND:
                self._recorder.lost += 1
                return
            line = record.getMessage()[:MAX_LINE_CHARS]
            self._recorder.say_line(record.levelname, line, at_once=record.levelno >= logging.ERROR)
        except Exception:  # the engine's own logging must go on
            self._recorder.lost += 1


def listen(recorder: Recorder) -> None:
    """Attach a handler where there is none. vLLM configures its logging anew in several of its processes after it has loaded its
    plugins, and drops what hangs there: call it again now and then.
    """
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, GuestHandler) for handler in logger.handlers):
        logger.addHandler(GuestHandler(recorder))
