"""Define one trial of the battery: a fault, its expectation, and a run.

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
"""The result in plain text with its figures, and whether it is as expected."""


class NotRunError(Exception):
    """The trial cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of a trial.

    ``folder``: empty, its own, removed afterwards. ``deadline_s``: on the monotonic clock.
    """

    folder: Path
    seed: int
    long: bool
    deadline_s: float

    def random(self) -> random.Random:
        """Return the trial's own random source; the same seed gives the same trial."""
        return random.Random(self.seed)

    def left_s(self) -> float:
        """Return the seconds until the deadline, 0 when it is over."""
        return max(0.0, self.deadline_s - time.monotonic())

    def scale(self, short: float, long: float) -> float:
        """Choose a duration or a count by the form of the run."""
        return long if self.long else short


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row of the table.

    ``name``: unique, ``group.what``.
    ``expected``: plain text, what has to happen.
    ``seconds``, ``long_seconds``: how long it takes in the short and in the long form. The deadline is three times that and a
    minute.
    ``beside``: it may run beside another one.
    ``run``: raises ``NotRunError`` when this machine cannot run it; any other exception means that the trial failed.
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
