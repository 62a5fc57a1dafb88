"""Keep the plugin's exceptions out of the engine.

Every hook passes through here. A hook that keeps failing is disabled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from handrail.plugin.events import DEGRADED
from handrail.plugin.recorder import Recorder

FAILURES_ALLOWED: Final = 5


class HookGuard:
    """Count failures by hook, and disable a hook after ``FAILURES_ALLOWED``.

    It stays off until the process ends. Each failure is reported to the sidecar.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.failures: dict[str, int] = {}
        self.off: set[str] = set()

    def __call__(self, hook: str, observe: Callable[..., Any], *given: Any) -> Any:
        """Return ``observe(*given)``, or None where it failed or is off."""
        if hook in self.off:
            return None
        try:
            return observe(*given)
        except Exception as error:
            self.failed(hook, error)
            return None

    def failed(self, hook: str, error: Exception) -> None:
        count = self.failures.get(hook, 0) + 1
        self.failures[hook] = count
        if count >= FAILURES_ALLOWED:
            self.off.add(hook)
        self.recorder.record((DEGRADED, time.monotonic_ns(), hook, type(error).__name__, count >= FAILURES_ALLOWED))
