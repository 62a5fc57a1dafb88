"""One objective: signal, pool, models, threshold and target share."""

# ruff: noqa: RUF009 - setting() returns dataclasses.field(), which is what a default should be
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from handrail.config.schema import Problem, setting
from handrail.config.types import Duration
from handrail.metrics.histogram import LATENCY_SECONDS
from handrail.records import Role

POOLS: Final = (Role.EDGE, Role.ROUTER, Role.PREFILL, Role.DECODE, Role.COLLOCATED)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # it becomes a label's value, in templates too
_LEAST: Final = Duration(round(LATENCY_SECONDS[0] * 1e9))
_MOST: Final = Duration(round(LATENCY_SECONDS[-1] * 1e9))


class ObjectiveSignal(str, Enum):
    """What an objective promises."""

    TTFT = "ttft"  # the first token comes within the threshold
    STREAM_GAP = "stream_gap"  # each gap between chunks is within the threshold
    ITL = "itl"  # each gap by the tokens of its chunk, where these are known
    SUCCESS = "success"  # the request did not fail
    KV_FETCH = "kv_fetch"  # the hand-off did not fail

    @property
    def timed(self) -> bool:
        return self in (ObjectiveSignal.TTFT, ObjectiveSignal.STREAM_GAP, ObjectiveSignal.ITL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObjective:
    """One objective.

    ``models`` empty: every model that no other objective of this signal and role names.
    """

    signal: ObjectiveSignal = setting(help="figure that is promised", example="ttft")
    target_percent: float = setting(
        help="share of requests (gaps, fetches) that must keep it", example="99.5", at_least=50.0, at_most=99.999
    )
    role: Role | None = setting(
        None, help="pool whose sidecars count", example="edge", choices=tuple(role.value for role in POOLS)
    )
    models: tuple[str, ...] = setting((), help="exact model_name of each", example="[llama-70b]")
    threshold: Duration | None = setting(None, help="longest time", example="2s", at_least=_LEAST, at_most=_MOST)
    p99: Duration | None = setting(
        None, help="a limit for the 99th percentile of five minutes", example="5s", at_least=_LEAST, at_most=_MOST
    )
    name: str = setting("", help="value of the label slo", example="ttft-edge")

    def cross_check(self) -> Iterator[Problem]:
        """Yield the problems that no single field shows."""
        if self.name and not _NAME.fullmatch(self.name):
            yield Problem(
                path="name", value=self.name, rule="must be letters, digits, '.', '_' and '-'", example="name: ttft-70b"
            )
        if self.signal.timed and self.threshold is None:
            yield Problem(path="threshold", rule=f"must be given for {self.signal.value}", example="threshold: 2s")
        for key in ("threshold", "p99"):
            if not self.signal.timed and getattr(self, key) is not None:
                yield Problem(path=key, rule=f"has no meaning for {self.signal.value}, which is not timed", example=f"no {key}")
        if self.signal is ObjectiveSignal.KV_FETCH:
            for key in ("role", "models"):
                if getattr(self, key):
                    yield Problem(
                        path=key, rule="must be left out: the consumer counts KV fetches without it", example=f"no {key}"
                    )
        elif self.role is None:
            yield Problem(path="role", rule="must be given", example="role: edge")

    def resolved(self) -> ServiceObjective:
        if self.name:
            return self
        role = f"-{self.role.value}" if self.role else ""
        return dataclasses.replace(self, name=f"{self.signal.value}{role}")
