"""Define the result of a comparison as plain data.

``comparison.compare`` makes it, the API sends it as JSON, and ``handrail compare`` draws it.
Durations are ns (floats, since means and differences are not whole), rates are requests a second, shares are 0 to 1.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

ITL_OF: Final = ("p99", "max", "mean")
"""Figures of a request's gaps that the ITL objective can apply to."""

TPOT: Final = "mean"
"""Figure that DistServe uses: the mean time per output token.

Every answer holds it beside the chosen figure.
"""

DEFAULT_TTFT_NS: Final = 1_000_000_000
DEFAULT_ITL_NS: Final = 50_000_000
DEFAULT_ATTAIN: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTargets:
    """Objectives for a request, and the share of requests that must meet both."""

    ttft_ns: int = DEFAULT_TTFT_NS
    itl_ns: int = DEFAULT_ITL_NS
    itl_of: str = "p99"
    attain: float = DEFAULT_ATTAIN

    def validate(self) -> list[str]:
        """Return each problem in words; empty when the targets are valid."""
        problems = []
        if self.ttft_ns <= 0:
            problems.append("ttft: must be above 0")
        if self.itl_ns <= 0:
            problems.append("itl: must be above 0")
        if self.itl_of not in ITL_OF:
            problems.append(f"itl_of: {self.itl_of!r} is not one of {', '.join(ITL_OF)}")
        if not 0 < self.attain < 1:
            problems.append(f"attain: {self.attain} is not between 0 and 1, such as 0.9")
        return problems


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; None where the rows do not hold it."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLevel:
    """A period of steady rate with its shares of judged requests.

    The shares are of requests that met both objectives, and each objective alone.
    """

    rate: float
    requests: int
    judged: int
    seconds: float
    met: Estimate
    met_ttft: Estimate
    met_itl: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Goodput of a whole arm, in requests a second; divide by ``gpus``.

    ``at_least`` and ``below``: bounds at 95 %; None: no bound.
    ``contradicts``: a lower rate missed the goal although a higher one reached it, so something other than the rate matters.
    """

    levels: tuple[RateLevel, ...]
    at_least: float | None
    below: float | None
    estimate: float | None
    gpus: int
    contradicts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOverhead:
    """Time that the hand-off added to TTFT, with its bounds, in ns.

    The bounds are at least and at most, per request and per 1,000 prompt tokens.
    ``between_ns``: what router and network between the processes took besides, per request; neither bound includes it.
    ``measured``: the share of requests whose transfer was measured; where it is 1, both bounds are equal.
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
    """Report of one arm.

    ``figures``: by the names of ``FIGURES``.
    ``quantiles_ns``: data of the picture, by figure then share.
    ``goodput``: by the objectives; it decides the verdict.
    ``goodput_tpot``: DistServe's goodput, whatever ``itl_of`` is.
    """

    name: str
    where: tuple[str, ...]
    layout: str  # split | collocated
    layout_source: str
    begin_unix_ns: int
    end_unix_ns: int
    scope: str
    requests: int
    rate: float
    failed: Estimate
    left: int
    engines: int
    gpus: int
    gpus_source: str
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
    """Difference of one figure between two arms.

    ``says``: better | worse | no difference | cannot tell.
    """

    figure: str
    of: float | None
    to: float | None
    difference: Estimate
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """Comparison of two arms.

    ``word``, and ``short`` for the reasons: see ``verdict.py``.
    ``word_tpot``: the word by DistServe's goodput, for a split arm against one that is not split, with alike workloads.
    ``unlike``: why the workloads are not comparable.
    """

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
    """The whole answer.

    ``simultaneous``: how many differences share one confidence of 95 %.
    """

    objectives: SloTargets
    confidence: float
    simultaneous: int
    word: str
    headline: str
    arms: tuple[ArmReport, ...]
    pairs: tuple[PairReport, ...]


def to_plain(value: Any) -> Any:
    """Convert dataclasses to JSON documents; fields keep their names."""
    return asdict(value)


def from_plain(kind: type[T], plain: Any) -> T:
    """Convert a JSON document back: the inverse of ``to_plain``.

    Unknown names are ignored. Raises ``ValueError`` where a field is missing or has the wrong shape.
    """
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
