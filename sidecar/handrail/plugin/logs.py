"""Handler on the engine's own logger, so that no log file is needed.

It passes on warnings and worse, as the engine logged them. The sidecar interprets the lines (engine_logs/lines.py). The handler
formats only the lines that the engine formats as well.
It interprets two lines itself, since the process may be killed soon after: the one that announces its end, and the one that
reports its failure. vLLM 0.32 kills its core right after the signal, so no hook of the core is called.
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
"""Line of vLLM 0.32 about a failed core.

Where the engine words it otherwise, its end counts as a death.
"""


class GuestHandler(logging.Handler):
    """Hand lines to the recorder; lines beyond ``LINES_A_SECOND`` count as lost."""

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
    """Attach a handler where there is none.

    vLLM configures its logging again in several of its processes after it has loaded its plugins, and drops existing handlers.
    So call this again now and then.
    """
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(handler, GuestHandler) for handler in logger.handlers):
        logger.addHandler(GuestHandler(recorder))
