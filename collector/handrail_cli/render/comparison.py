"""Render a comparison as text.

It shows the verdict with its reasons, the picture, the figures, the arms, and the notes on how far to trust them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.phases import KV_AND_QUEUE, ORDER, Phase
from handrail_cli.render.phases import LOOKS
from handrail_cli.render.sparkline import Strip, draw, legend
from handrail_cli.render.waterfall import MIN_WIDTH
from handrail_cli.tables import Column, duration, table
from handrail_collector.compare import verdict as words
from handrail_collector.compare.formatting import bounds, label, points, portion, rate, signed
from handrail_collector.compare.report import (
    TPOT,
    ArmReport,
    Change,
    Comparison,
    Estimate,
    HandoffOverhead,
    PairReport,
    RateLevel,
)

_TONES: Final = {
    words.PAYS: "green",
    words.BETTER: "green",
    words.DOES_NOT_PAY: "red",
    words.WORSE: "red",
    words.MIXED: "yellow",
    words.CANNOT_TELL: "yellow",
    words.NO_DIFFERENCE: "",
}


def render_comparison(comparison: Comparison, width: int, *, zone: tzinfo | None = None) -> RenderableType:
    """Render the comparison ``width`` columns wide, at least 60.

    ``zone``: time zone of the times; None is the local one.
    """
    width = max(width, MIN_WIDTH)
    sections = (
        _verdict(comparison, width),
        _picture(comparison, width),
        *(_changes(comparison, pair, width) for pair in comparison.pairs),
        _phases(comparison, width),
        _goodput(comparison, width),
        _handoffs(comparison, width),
        _arms(comparison, width, zone),
        _notes(comparison, width),
    )
    shown: list[RenderableType] = []
    for section in sections:
        found = list(section)
        if found:
            shown += [*([Text()] if shown else []), *found]
    return Group(*shown)


def _verdict(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    yield Text(
        "\n".join(textwrap.wrap(f"▶ {comparison.headline}", width, subsequent_indent="  ")),
        style=f"bold {_TONES.get(comparison.word, '')}".strip(),
    )
    goal = comparison.objectives
    of_gaps = {"p99": "the p99 of its gaps", "max": "its largest gap", "mean": "its mean time per output token"}[goal.itl_of]
    query = (
        f"for at least {goal.attain:.0%} of requests: TTFT at most {format_duration(goal.ttft_ns)}, "
        f"{of_gaps} at most {format_duration(goal.itl_ns)}"
    )
    yield Text("\n".join(textwrap.wrap(query, width, initial_indent="  ", subsequent_indent="  ")), style="dim")
    for pair in comparison.pairs:
        if len(comparison.pairs) > 1:
            yield Text(f"  {pair.to} against {pair.of}: {pair.word}", style=_TONES.get(pair.word, ""))
        for reason in pair.reasons:
            yield _bullet(reason, width)


def _bullet(text: str, width: int) -> Text:
    lines = textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return Text("\n".join(lines))


def _picture(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    goal = comparison.objectives
    unit = comparison.arms[0].gap_unit
    gaps = "Gaps between tokens" if unit == "token" else "Gaps between chunks of a stream (a chunk may hold several tokens)"
    drawn = False
    for title, figure, objective_ns in (
        ("TTFT", "ttft", goal.ttft_ns),
        (gaps, "gap", None if goal.itl_of == "mean" else goal.itl_ns),
    ):
        strips = [Strip(arm.name, arm.quantiles_ns.get(figure, {})) for arm in comparison.arms]
        for line in draw(title, strips, objective_ns, width):
            drawn = True
            yield line
    if drawn:
        yield legend(objective=True)


def _changes(comparison: Comparison, pair: PairReport, width: int) -> Iterator[RenderableType]:
    arm = next(arm for arm in comparison.arms if arm.name == pair.of)
    yield Text(f"{pair.to} against {pair.of}", style="bold")
    head = f"difference (all {comparison.simultaneous} within these bounds: {comparison.confidence:.0%})"
    columns = [
        Column[Change]("", lambda change: label(change.figure, arm.gap_unit)),
        Column(pair.of, lambda change: _figure(change, change.of), right=True),
        Column(pair.to, lambda change: _figure(change, change.to), right=True),
        Column(head, _difference),
        Column("", lambda change: Text(change.says, style=_TONES.get(change.says, ""))),
    ]
    yield table(columns, pair.changes, width)


def _figure(change: Change, value: float | None) -> Text | str:
    return _share(value) if change.figure == "failed_share" else duration(value)


def _difference(change: Change) -> str:
    return points(change.difference) if change.figure == "failed_share" else signed(change.difference)


def _phases(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    """Draw the mean contributions to TTFT, then the figures.

    Each arm has one bar, and all bars have one scale.
    """
    arms = [arm for arm in comparison.arms if arm.phases_ns]
    if not arms:
        return
    yield Text("Where the mean TTFT went", style="bold")
    names = max(len(arm.name) for arm in arms) + 2
    longest = max(sum(_value(each) for each in arm.phases_ns.values()) for arm in arms)
    for arm in arms:
        whole = sum(_value(each) for each in arm.phases_ns.values())
        line = Text(f"{arm.name:<{names}}{_duration(whole):>8}  ")
        scale = (width - names - 10) / longest if longest else 0.0
        reached, drawn = 0.0, 0
        for phase in _in_path_order(arm):
            reached += _value(arm.phases_ns[phase])
            look = LOOKS[_place(phase)]
            line.append(look.glyph * (round(reached * scale) - drawn), style=look.style)
            drawn = round(reached * scale)
        yield line
    yield Text("   ".join(f"{look.glyph * 2} {look.label}" for look in LOOKS.values()), style="dim")
    two = len(arms) == 2 and len(comparison.pairs) == 1
    changes = {change.figure: change for change in comparison.pairs[0].phases} if two else {}
    shown = [comparison.pairs[0].of, comparison.pairs[0].to] if two else [arm.name for arm in arms]
    by_name = {arm.name: arm for arm in arms}
    columns = [
        Column[str]("phase", lambda phase: Text(phase, style=LOOKS[_place(phase)].style)),
        *(Column(name, _mean_of(by_name[name]), right=True) for name in shown),
    ]
    if two:
        columns.append(Column("difference", lambda phase: signed(changes[phase].difference) if phase in changes else ""))
        columns.append(Column("", lambda phase: Text(_longer_shorter(changes[phase]) if phase in changes else "", "dim")))
    rows = [phase.value for phase in Phase if any(phase.value in arm.phases_ns for arm in arms)]
    yield table(columns, rows, width)


def _mean_of(arm: ArmReport) -> Callable[[str], Text]:
    return lambda phase: duration(_value(arm.phases_ns.get(phase)))


def _in_path_order(arm: ArmReport) -> list[str]:
    """Order the phases: those at P, those between, those at D.

    Unattributed phases come last.
    """
    return sorted(arm.phases_ns, key=lambda phase: (tuple(LOOKS).index(_place(phase)), ORDER[Phase(phase)]))


def _place(phase: str) -> str:
    """Return the place that gives a phase its glyph and colour."""
    if phase == Phase.UNATTRIBUTED.value:
        return phase
    return next(
        (place for place in ("prefill", "decode") if phase.startswith(f"{place}_") and "hops" not in phase),
        _OTHER_PLACES.get(phase, "path"),
    )


_OTHER_PLACES: Final = {phase.value: "decode" for phase in (*KV_AND_QUEUE, Phase.FIRST_STEP)}


def _value(estimate: Estimate | None) -> float:
    return estimate.value if estimate is not None and estimate.value is not None else 0.0


def _longer_shorter(change: Change) -> str:
    return {words.BETTER: "shorter", words.WORSE: "longer"}.get(change.says, change.says)


def _goodput(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    """Render the goodput by the objectives, and DistServe's beside it.

    The second objective of DistServe's is about the mean time per output token (TPOT).
    """
    yield Text("Goodput: the highest rate per GPU at which enough requests meet both objectives", style="bold")
    chosen = {"p99": "gap p99", "max": "longest gap", "mean": "TPOT"}[comparison.objectives.itl_of]
    both = comparison.objectives.itl_of != TPOT
    columns = [
        Column[_Goodput]("arm", lambda row: row.arm.name if row.first else ""),
        Column("rate per GPU", lambda row: rate(row.level.rate / row.arm.gpus), right=True),
        Column("judged", lambda row: f"{row.level.judged:,}"),
        Column("TTFT", lambda row: _share(row.level.met_ttft.value)),
        Column(chosen, lambda row: _share(row.level.met_itl.value)),
        Column(f"TTFT and {chosen}", lambda row: portion(row.level.met)),
    ]
    if both:
        columns.append(Column("TPOT", lambda row: _share(row.tpot.met_itl.value)))
        columns.append(Column("TTFT and TPOT", lambda row: portion(row.tpot.met)))
    rows = [
        _Goodput(arm, level, tpot, not at)
        for arm in comparison.arms
        for at, (level, tpot) in enumerate(zip(arm.goodput.levels, arm.goodput_tpot.levels, strict=True))
    ]
    if rows:
        yield table(columns, rows, width)
    for arm in comparison.arms:
        yield from (_bullet(f"{arm.name}: {each}", width) for each in _bounded(arm, chosen, both))
    if both:
        yield _bullet(f"the verdict uses {chosen}; DistServe defines goodput by TPOT (--itl-of mean)", width)
    if any(len(arm.goodput.levels) == 1 for arm in comparison.arms):
        yield _bullet(
            "one rate gives only a bound; rates on both sides of the goal give a value (several runs with commas)", width
        )


@dataclass(frozen=True, slots=True)
class _Goodput:
    arm: ArmReport
    level: RateLevel
    tpot: RateLevel
    first: bool  # of its arm


def _bounded(arm: ArmReport, chosen: str, both: bool) -> Iterator[str]:
    if not arm.goodput.levels:
        yield "too few requests to judge"
        return
    yield f"by {chosen} {bounds(arm.goodput)}" + (f"; by TPOT {bounds(arm.goodput_tpot)}" if both else "")
    if arm.goodput.contradicts:
        yield "a lower rate missed the goal that a higher rate reached, so more than the rate differs"


def _handoffs(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    reports = [(arm.name, arm.handoff) for arm in comparison.arms if arm.handoff is not None]
    if reports:
        yield Text("What the hand-off added to TTFT, mean over requests", style="bold")
    for name, handoff in reports:
        yield from (_bullet(each, width) for each in _handoff(name, handoff))


def _handoff(name: str, handoff: HandoffOverhead) -> Iterator[str]:
    requests = f"{handoff.requests:,} requests"
    if handoff.measured == 1:
        per_tokens = _within(handoff.at_most_per_1000_tokens_ns)
        yield f"{name}: {_within(handoff.at_most_ns)} a request, {per_tokens} per 1,000 prompt tokens ({requests}, kv_* phases)"
        yield _beside(name, handoff)
        return
    yield (
        f"{name}: at most {_within(handoff.at_most_ns)} a request, "
        f"{_within(handoff.at_most_per_1000_tokens_ns)} per 1,000 prompt tokens ({requests})"
    )
    if handoff.at_least_ns.value:
        yield f"{name}: at least {_within(handoff.at_least_ns)} a request (kv_* phases)"
    yield (
        f"the transfer was measured for {handoff.measured:.0%} of them; the bound is the unattributed time at D or between, "
        "which includes D's queue"
    )
    yield _beside(name, handoff)


def _beside(name: str, handoff: HandoffOverhead) -> str:
    return f"{name}: in addition, router and network between the processes took {_within(handoff.between_ns)} a request"


def _within(estimate: Estimate) -> str:
    if estimate.value is None:
        return "an unknown time"
    if estimate.low is None or estimate.high is None:
        return _duration(estimate.value)
    return f"{_duration(estimate.value)} ({_duration(estimate.low)} to {_duration(estimate.high)})"


def _arms(comparison: Comparison, width: int, zone: tzinfo | None) -> Iterator[RenderableType]:
    yield Text("What was compared", style="bold")
    rows = [(title, [cell(arm, zone) for arm in comparison.arms]) for title, cell in _FACTS]
    columns = [
        Column[tuple[str, list[str]]]("", lambda row: Text(row[0], style="dim")),
        *(Column(arm.name, _fact_of(at)) for at, arm in enumerate(comparison.arms)),
    ]
    yield table(columns, [row for row in rows if any(row[1])], width)


def _fact_of(at: int) -> Callable[[tuple[str, list[str]]], str]:
    return lambda row: row[1][at]


def _observed(arm: ArmReport, zone: tzinfo | None) -> str:
    first, last = format_time(arm.begin_unix_ns, None, zone), format_time(arm.end_unix_ns, arm.begin_unix_ns, zone)
    return f"{first.partition('.')[0]} to {last.partition('.')[0]}"


_FACTS: Final[Sequence[tuple[str, Callable[[ArmReport, tzinfo | None], str]]]] = (
    ("where", lambda arm, _: ", ".join(arm.where)),
    ("requests began", _observed),
    ("layout", lambda arm, _: f"{arm.layout}: {arm.layout_source}"),
    ("requests", lambda arm, _: f"{arm.requests:,}, scope {arm.scope}"),
    ("rate", lambda arm, _: f"{rate(arm.rate)}, {rate(arm.rate / arm.gpus)} per GPU"),
    ("GPUs", lambda arm, _: f"{arm.gpus} ({arm.gpus_source})"),
    ("failed", lambda arm, _: portion(arm.failed)),
    ("clients left", lambda arm, _: f"{arm.left:,}" if arm.left else ""),
    ("prompt, answer", lambda arm, _: f"{_tokens(arm.prompt_tokens)}, {_tokens(arm.output_tokens)} tokens in the mean"),
    ("prefix cache", lambda arm, _: f"{arm.cached_share:.0%} of prompt tokens" if arm.cached_share else ""),
    ("gaps", lambda arm, _: f"{arm.gaps:,} between {'tokens' if arm.gap_unit == 'token' else 'chunks'}" if arm.gaps else "none"),
    ("model", lambda arm, _: ", ".join(arm.models)),
)


def _tokens(mean: float | None) -> str:
    return "?" if mean is None else f"{mean:,.0f}"


def _notes(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    lines = [f"{arm.name}: {note}" for arm in comparison.arms for note in arm.notes]
    if lines:
        yield Text("Limits of this comparison", style="bold")
        yield from (_bullet(each, width) for each in lines)


def _duration(duration_ns: float | None) -> str:
    return "–" if duration_ns is None else format_duration(round(duration_ns))


def _share(share: float | None) -> str:
    return "–" if share is None else portion(Estimate(share, None, None))
