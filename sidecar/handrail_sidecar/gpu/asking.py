"""Make rare calls with a time limit, each in a thread that may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from handrail_sidecar.gpu.failures import HANGS, NvmlFailed

T = TypeVar("T")

_BEGUN: Final = object()


class Asker:
    """Runs at most one thread per key inside a call.

    A call that has not returned is not made again until it has.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._running: dict[str, threading.Thread] = {}

    def __call__(self, key: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return what ``function`` returns, or raise what it raises.

        Raises ``NvmlFailed`` (``HANGS``) when the call does not return in time.
        """
        before = self._running.get(key)
        if before is not None and before.is_alive():
            raise NvmlFailed(HANGS)
        answer: list[Any] = [_BEGUN, None]

        def ask() -> None:
            try:
                answer[0] = function(*arguments)
            except BaseException as error:
                answer[1] = error

        thread = self._running[key] = threading.Thread(target=ask, name=f"gpu asks {key}", daemon=True)
        thread.start()
        thread.join(self.within_s)
        if answer[1] is not None:
            raise answer[1]
        if answer[0] is _BEGUN:
            raise NvmlFailed(HANGS)
        result: T = answer[0]
        return result

    @property
    def hanging(self) -> int:
        """Number of calls that have not returned."""
        return sum(thread.is_alive() for thread in self._running.values())
