"""What a comparison says, as plain data: made by ``comparison.compare``, sent as JSON, drawn by ``handrail compare``.

Durations are ns (floats, since means and differences are none of whole ns), rates requests a second, shares 0 to 1.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

ITL_OF: Final = ("p99", "max", "mean")
"""What of a request's gaps the ITL objective is about."""

TPOT: Final = "mean"
"""DistServe's: the mean time per output token. It stands beside the chosen one in every answer."""

DEFAULT_TTFT_NS: Final = 1_000_000_000
DEFAULT_ITL_NS: Final = 50_000_000
DEFAULT_ATTAIN: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """What a request has to meet, and the share of requests that has to meet both."""

    ttft_ns: int = DEFAULT_TTFT_NS
    itl_ns: int = DEFAULT_ITL_NS
    itl_of: str = "p99"
    attain: float = DEFAULT_ATTAIN

    def validate(self) -> list[str]:
        """What is wrong with it, in words; empty when it is fine."""
        problems = []
        if self.ttft_ns <= 0:
            problems.append("ttft: must be longer than nothing")
        if self.itl_ns <= 0:
            problems.append("itl: must be longer than nothing")
        if self.itl_of not in ITL_OF:
            problems.append(f"itl_of: {self.itl_of!r} is not one of {', '.join(ITL_OF)}")
        if not 0 < self.attain < 1:
            problems.append(f"attain: {self.attain} is not between 0 and 1, such as 0.9")
        return problems


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval; None where the rows do not say it."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLevel:
    """A stretch of steady rate: what share of the judged requests met both objectives, and each alone."""

    rate: float
    requests: int
    judged: int
    seconds: float
    met: Estimate
    met_ttft: Estimate
    met_itl: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Of a whole arm, in requests a second; divide by ``gpus``. ``at_least`` and ``below``: bounds at 95 %; None: no bound.

    ``contradicts``: a lower rate missed the goal although a higher one reached it, so something else than the rate matters.
    """

    levels: tuple[RateLevel, ...]
    at_least: float | None
    below: float | None
    estimate: float | None
    gpus: int
    contradicts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOverhead:
    """What the hand-off added to TTFT: at least and at most, per request and per 1,000 prompt tokens, ns.

    ``between_ns``: what router and network between the processes took beside it, per request; no part of either bound.
    ``measured``: the share of requests whose transfer was measured; where it is 1, both bounds are the same.
    """

    requests: int
    measured: float
    at_least_ns: Estimate
    at_most_ns: Estimate
    at_least_per_1000_tokens_ns: Estimate
    at_most_per_1000_tokens_ns: Estimate
    between_ns: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One arm. ``figures``: by the names of ``FIGURES``; ``quantiles_ns``: for a picture, by figure then share.

    ``goodput``: by the objectives, which decides the verdict; ``goodput_tpot``: DistServe's, whatever ``itl_of`` is.
    """

    name: str
    where: tuple[str, ...]
    layout: str  # split | collocated
    layout_told_by: str
    begin_unix_ns: int
    end_unix_ns: int
    scope: str
    requests: int
    rate: float
    failed: Estimate
    left: int
    engines: int
    gpus: int
    gpus_told_by: str
    gap_unit: str | None
    gaps: int
    prompt_tokens: float | None
    output_tokens: float | None
    cached_share: float | None
    models: tuple[str, ...]
    figures: Mapping[str, Estimate]
    quantiles_ns: Mapping[str, Mapping[str, float]]
    phases_ns: Mapping[str, Estimate]
    goodput: Goodput
    goodput_tpot: Goodput
    handoff: HandoffOverhead | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure from one arm to another. ``says``: better | worse | no difference | cannot tell."""

    figure: str
    of: float | None
    to: float | None
    difference: Estimate
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """Two arms. ``word``, and ``short`` for why: see ``verdict.py``; ``word_tpot``: by DistServe's goodput, of a split arm
    against one that is not and alike; ``unlike``: why the workloads are not comparable."""

    of: str
    to: str
    word: str
    word_tpot: str | None
    short: tuple[str, ...]
    reasons: tuple[str, ...]
    unlike: tuple[str, ...]
    changes: tuple[Change, ...]
    phases: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole answer. ``simultaneous``: how many differences share one 95 %."""

    objectives: SloTargets
    confidence: float
    simultaneous: int
    word: str
    headline: str
    arms: tuple[ArmReport, ...]
    pairs: tuple[PairReport, ...]


def to_plain(value: Any) -> Any:
    """Dataclasses as JSON documents; fields keep their names."""
    return asdict(value)


def from_plain(kind: type[T], plain: Any) -> T:
    """Inverse of ``to_plain``; unknown names are ignored. Raises ``ValueError`` where something is missing or misshapen."""
    try:
        made: T = _made(kind, plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not understood as {kind.__name__}: {error!r}") from error
    return made


def _made(kind: Any, plain: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if plain is None else _made(next(each for each in inner if each is not type(None)), plain)
    if origin is tuple:
        return tuple(_made(inner[0], each) for each in plain)
    if origin is not None and issubclass(origin, Mapping):
        return {name: _made(inner[1], each) for name, each in plain.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{each.name: _made(hints[each.name], plain[each.name]) for each in fields(kind)})  # type: ignore[operator]
    if kind is float and isinstance(plain, int):
        return float(plain)
    if not isinstance(plain, kind):
        raise TypeError(f"{kind.__name__} expected, not {plain!r}")
    return plain
