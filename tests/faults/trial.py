"""What one trial of the battery is: a fault, what is expected under it, and a run that says what it got.

A module of trials exposes ``TRIALS: tuple[Trial, ...]``; ``battery.py`` lists the modules.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Got: TypeAlias = tuple[str, bool]
"""What happened, in plain text with its figures, and whether it is what was expected."""


class NotRunError(Exception):
    """The trial cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a trial gets. ``folder``: empty, its own, removed afterwards. ``deadline_s``: on the monotonic clock."""

    folder: Path
    seed: int
    long: bool
    deadline_s: float

    def random(self) -> random.Random:
        """The trial's own source of chance; the same seed gives the same trial."""
        return random.Random(self.seed)

    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it is over."""
        return max(0.0, self.deadline_s - time.monotonic())

    def scale(self, short: float, long: float) -> float:
        """A duration or a count by the form of the run."""
        return long if self.long else short


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row of the table.

    ``name``: unique, ``group.what``. ``expected``: plain text, what has to happen. ``seconds``, ``long_seconds``: how long it
    takes in the short and in the long form; the deadline is thrice that and a minute. ``beside``: it may run beside another one.
    ``run``: raises ``NotRunError`` where this machine cannot run it; any other exception is a trial that is not ok.
    """

    name: str
    group: str
    expected: str
    seconds: float
    long_seconds: float | None = None
    beside: bool = False
    run: Callable[[Context], Got | Awaitable[Got]]

    def estimate_s(self, long: bool) -> float:
        return self.long_seconds if long and self.long_seconds is not None else self.seconds
