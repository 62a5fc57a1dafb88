"""Render one request as a terminal waterfall.

It shows what happened, where the time went, how certain that is, and how the evidence was joined.
It is a pure function of the row. ``handrail trace`` and ``handrail demo`` print it, and the README shows it.
Every phase has a glyph for its process besides the colour, so that pipes, NO_COLOR and colour-blind readers lose nothing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.phases import Phase
from handrail_cli import glossary
from handrail_cli.render.devices import Axis, track_lines
from handrail_cli.render.kv_fetches import handoff_lines
from handrail_cli.render.phases import LOOKS, Look, in_path_order, instance_of, main_id, percent, phase_label, slowest, whole_ns
from handrail_cli.render.stalls import stall_lines
from handrail_collector.api.schema import RequestAnswer
from handrail_collector.rows import PhaseRow, RequestRow
from handrail_collector.store.tables.spans import SpanRow

MIN_WIDTH: Final = 60
_ROLE_ORDER: Final = {"edge": 0, "router": 1, "prefill": 2, "decode": 3}
_DOMINANT: Final = 0.25  # below this share no phase is called the cause
_EVIDENCE: Final = "evidence, bound"
_FIGURES: Final = 1 + 8 + 1 + 6 + 2  # duration and share with their blanks, before the bar
_MIN_BAR: Final = 12
_NAME_WIDTH: Final = 16
_STATUS_ERROR: Final = 2  # OTLP Status.code
PAUSED_NS: Final = 20_000_000
"""Least pause that gets a sentence."""

_HARD_SPACE: Final = "\u00a0"  # textwrap does not break at it
_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=%|(?:ns|µs|ms|s)\b)")


def render_waterfall(answer: RequestAnswer, width: int = 100, *, zone: tzinfo | None = None) -> RenderableType:
    """Draw the request ``width`` columns wide (at least 60).

    ``zone``: time zone of the start time; None is the local one.
    """
    row = answer.row
    width = max(width, MIN_WIDTH)
    sections = (
        ("", _header(row, width, zone)),
        ("", _verdict(row, width, answer.baseline)),
        ("Findings", _findings(row, width)),
        ("", _phases(row, width)),
        ("", _tracks(row, answer.hardware, width)),
        ("Unattributed", _unattributed(row, width)),
        ("KV fetches", handoff_lines(answer.fetches, width)),
        ("Stream", _stream(row, width)),
        ("Stalls", stall_lines(row, answer.stalls, width)),
        ("How the evidence was joined", _joins(row, width)),
        ("Spans (each by the wall clock of its own host)", _spans(row, answer.spans, width)),
    )
    lines: list[Text] = []
    for title, body in sections:
        found = list(body)
        if found:
            lines += [*([Text()] if lines else []), *([Text(title, style="bold")] if title else []), *found]
    return Group(*lines)


# --- sections -------------------------------------------------------------------------------------------------------------


def _header(row: RequestRow, width: int, zone: tzinfo | None) -> Iterator[Text]:
    title = Text(overflow="fold")
    title.append(main_id(row), style="bold")
    title.append("  ")
    title.append(f" {row.outcome} ", style=f"bold reverse {glossary.tone(row.outcome)}")
    yield title
    kind = {True: "streamed", False: "not streamed", None: ""}[row.stream]
    what = [kind, (row.operation or row.path or "").replace("_", " "), row.model or ""]
    yield from _fact("request", what, width)
    yield from _fact("started", [f"{format_time(row.started_unix_ns, zone=zone)} {_zone_name(row, zone)}"], width)
    yield from _fact("TTFT", _first_token(row), width, style="bold")
    yield from _fact("total", [format_duration(row.duration_ns), _tokens(row)], width)
    yield from _fact("path", _path(row), width, separator=" → ")
    yield from _fact("scope", [f"{row.scope}: {glossary.plain(row.scope, glossary.SCOPE)}"], width)
    ids = {"trace": row.trace_id, "request": row.request_id, "client": row.client_request_id, "response": row.response_id}
    shown = [f"{name} {each}" for name, each in ids.items() if each and each != main_id(row)]
    yield from _fact("ids", [*shown, *(f"also trace {other}" for other in row.other_trace_ids)], width)


def _zone_name(row: RequestRow, zone: tzinfo | None) -> str:
    moment = datetime.fromtimestamp(row.started_unix_ns // 10**9, zone)
    return (moment if moment.tzinfo else moment.astimezone()).strftime("%Z")


def _first_token(row: RequestRow) -> list[str]:
    if row.ttft_token_ns is None and row.ttft_text_ns is None:
        return ["not seen: the answer came in one piece" if row.stream is False else "no first token was seen"]
    if row.ttft_token_ns is None:
        return [f"{format_duration(row.ttft_text_ns or 0)} to the first text", "token times are not known"]
    if row.ttft_text_ns == row.ttft_token_ns:
        return [f"{format_duration(row.ttft_token_ns)} to the first token, which has text"]
    text = "no visible text" if row.ttft_text_ns is None else f"{format_duration(row.ttft_text_ns)} to the first text"
    return [f"{format_duration(row.ttft_token_ns)} to the first token", text]


def _tokens(row: RequestRow) -> str:
    parts = []
    if row.prompt_tokens is not None:
        saved = [f"{row.cached_tokens} cached" if row.cached_tokens else ""]
        saved += [f"{row.kv_returned_tokens} fetched back from D" if row.kv_returned_tokens else ""]
        text = ", ".join(filter(None, saved))
        parts.append(f"{row.prompt_tokens} tokens in{f' ({text})' if text else ''}")
    if row.output_tokens is not None:
        parts.append(f"{row.output_tokens} out")
    return ", ".join(parts)


def _path(row: RequestRow) -> list[str]:
    stops = [
        ("edge", row.edge_instance),
        ("router", row.router_instance),
        ("P", row.prefill_instance),
        ("D", row.decode_instance),
    ]
    seen = [f"{name} {instance}" for name, instance in stops if instance] or ["no process has a name"]
    if row.prefill_attempts > 1:
        seen[-1] += f" ({row.prefill_attempts} prefill attempts)"
    return seen


def _verdict(row: RequestRow, width: int, baseline: Mapping[str, Any] | None) -> Iterator[Text]:
    """Write the first sentences of the page.

    They say how the request failed, which phase took the time, and whether that was unusual.
    """
    if row.outcome not in glossary.GOOD_OUTCOMES:
        details = [f"HTTP {row.status}" if row.status not in (None, 200) else "", row.error_type or ""]
        reported_text = ", ".join(each for each in details if each and each != row.outcome)
        ended = "ended" if row.outcome in glossary.NEUTRAL_OUTCOMES else "failed"
        text = f"▶ {ended} after {format_duration(row.duration_ns)}: {glossary.plain(row.outcome, glossary.OUTCOME)}"
        yield from _prose(
            f"{text}{f' ({reported_text})' if reported_text else ''}.", width, hang=2, style=f"bold {glossary.tone(row.outcome)}"
        )
        if not row.phases:
            return
    yield from _prose(f"▶ {_where_time_went(row)}", width, hang=2, style="bold")
    if baseline is not None:
        yield from _prose(slowness(baseline), width, indent=2)
    if (paused_text := standstill(row)) is not None:
        yield from _prose(paused_text, width, indent=2)


def _where_time_went(row: RequestRow) -> str:
    whole, top = whole_ns(row), slowest(row)
    if top is None or whole <= 0:
        return "No phases: the evidence does not say where the time went."
    at = (
        f" at {glossary.PLACE[top.process]} {instance_of(row, top.process)}".rstrip()
        if top.process in ("prefill", "decode")
        else ""
    )
    subject = f"{format_duration(whole)} {'to first token' if row.phase_of == 'ttft' else 'in total'}"
    share = percent(top.duration_ns, whole)
    if top.duration_ns < _DOMINANT * whole:
        return f"No phase dominates the {subject}; the largest is {top.phase}{at}, {format_duration(top.duration_ns)} ({share})."
    meaning = "spent in one of the phases named below" if top.may_be else glossary.plain(top.phase, glossary.PHASE)
    paused_ns = {"prefill": row.prefill_paused_ns, "decode": row.decode_paused_ns}.get(top.process) or 0
    if 2 * paused_ns >= top.duration_ns:
        meaning = "while a process of that engine was paused"
    return f"{top.phase}{at}: {format_duration(top.duration_ns)} of the {subject} ({share}), {meaning}."


def _phases(row: RequestRow, width: int) -> Iterator[Text]:
    if not row.phases:
        return
    ordered, whole, top = in_path_order(row.phases), whole_ns(row), slowest(row)
    names = [phase_label(phase) for phase in ordered]
    axis, evidence = _geometry(row, ordered, width)
    name_width, bar_width = axis.name_width, axis.bar_width
    what = "time to first token" if row.phase_of == "ttft" else "total time"
    yield Text(f"Where the {what} went ({format_duration(whole)})", style="bold")
    head = f"{'phase':<{name_width}} {'time':>8} {'share':>6}  {_axis(whole, bar_width)}  {_EVIDENCE if any(evidence) else ''}"
    yield Text(head.rstrip(), style="dim")
    start_ns = 0
    for phase, name, statement in zip(ordered, names, evidence, strict=True):
        look = _look(phase)
        line = Text()
        line.append(f"{name:<{name_width}} ", style=look.style)
        line.append(
            f"{format_duration(phase.duration_ns):>8} {percent(phase.duration_ns, whole):>6}", "bold" if phase is top else ""
        )
        line.append(f"  {_bar(start_ns, phase.duration_ns, whole, bar_width, look.glyph)}", style=look.style)
        line.append(f"  {statement}", style="dim")
        line.rstrip()
        yield line
        start_ns += phase.duration_ns
    yield from _legend(row, ordered, width)
    if start_ns != whole:
        yield from _prose(
            f"The phases sum to {format_duration(start_ns)}, not to {format_duration(whole)}.", width, style="yellow"
        )


def _geometry(row: RequestRow, ordered: Sequence[PhaseRow], width: int) -> tuple[Axis, list[str]]:
    """Return the axis of the bars, and the text behind each bar."""
    evidence = [f"{phase.source} {'±' + format_duration(phase.bound_ns) if phase.bound_ns else 'exact'}" for phase in ordered]
    name_width = max((len(phase_label(phase)) for phase in ordered), default=_NAME_WIDTH)
    bar_width = width - name_width - _FIGURES - max(map(len, [*evidence, _EVIDENCE])) - 2
    if bar_width < _MIN_BAR:  # narrow: a bar says more at a glance than the evidence, which --json has too
        evidence, bar_width = [""] * len(evidence), width - name_width - _FIGURES
    return Axis(whole_ns(row), name_width, bar_width), evidence


def _tracks(row: RequestRow, hardware: Mapping[str, Any] | None, width: int) -> Iterator[Text]:
    """Draw the devices on the axis of the phases.

    For a request without phases, the axis is its whole duration.
    """
    axis, _ = _geometry(row, in_path_order(row.phases), width)
    if hardware is not None and axis.whole_ns > 0:
        yield from track_lines(hardware, axis, _axis(axis.whole_ns, axis.bar_width), width)


def _look(phase: PhaseRow) -> Look:
    return LOOKS[
        "unattributed" if phase.phase == Phase.UNATTRIBUTED.value else phase.process if phase.process in LOOKS else "path"
    ]


def _axis(whole_ns: int, width: int) -> str:
    """Draw ``0``, the middle and the end of the time axis over ``width`` columns."""
    middle, end = format_duration(whole_ns // 2), format_duration(whole_ns)
    axis = [" "] * width
    for text, start in (("0", 0), (middle, width // 2 - len(middle) // 2), (end, width - len(end))):
        axis[start : start + len(text)] = text
    return "".join(axis) if width >= len(middle) + len(end) + 8 else f"0{end:>{width - 1}}"


def _bar(start_ns: int, duration_ns: int, whole_ns: int, width: int, glyph: str) -> str:
    """Draw the phase at its place on the axis.

    Less than half a column is a thin mark, so that nothing looks longer than it was.
    """
    scale = width / whole_ns if whole_ns > 0 else 0.0
    first, last = round(start_ns * scale), min(round((start_ns + duration_ns) * scale), width)
    drawn = glyph * (last - first) or ("▏" if duration_ns else "·")
    return (" " * min(first, width - 1) + drawn).ljust(width)


def _legend(row: RequestRow, ordered: Sequence[PhaseRow], width: int) -> Iterator[Text]:
    present = {"unattributed" if phase.phase == Phase.UNATTRIBUTED.value else phase.process for phase in ordered}
    line = Text()
    for place, look in LOOKS.items():
        if place in present:
            label = f"{look.label} {instance_of(row, place)}".rstrip()
            if line and len(line) + len(label) + 5 > width:
                yield line
                line = Text()
            line.append("   " if line else "")
            line.append(look.glyph * 2, style=look.style)
            line.append(f" {label}", style="dim")
    yield line
    sources = dict.fromkeys(phase.source for phase in ordered)
    reported_text = "; ".join(f"{source}: {glossary.SOURCE[source]}" for source in sources if source in glossary.SOURCE)
    if reported_text:
        yield from _prose(reported_text, width, style="dim")
    spread = next((phase for phase in ordered if phase.phase == Phase.ROUTER_AND_HOPS.value), None)
    if spread is not None and spread.duration_ns * 20 >= whole_ns(row):
        text = "router_and_hops is exact as a sum; its parts before P, between P and D and after D are unknown."
        yield from _prose(text, width, style="dim")


def _unattributed(row: RequestRow, width: int) -> Iterator[Text]:
    seen = {join.evidence for join in row.joins}
    for phase in in_path_order(row.phases):
        if phase.phase != Phase.UNATTRIBUTED.value:
            continue
        place = {"prefill": "inside P", "decode": "inside D"}.get(phase.process, "between the processes")
        what = f"{format_duration(phase.duration_ns)} {place}"
        if not phase.may_be:
            yield from _prose(f"{what}: no evidence.", width, indent=2)
        elif phase.duration_ns * 20 < whole_ns(row):  # not worth a list
            yield from _prose(f"{what}: any of {', '.join(phase.may_be)}.", width, indent=2)
            continue
        else:
            yield from _prose(f"{what}; no evidence shows which of:", width, indent=2)
            for name in phase.may_be:
                yield from _prose(f"{name:<18} {glossary.plain(name, glossary.PHASE)}", width, indent=4, hang=19)
        yield from _prose(_advice(phase.process, seen), width, indent=2)


def _advice(place: str, seen: set[str]) -> str:
    """Return what would separate the hidden phases."""
    if place not in ("prefill", "decode"):
        return "A sidecar beside each process on the path, or the router's own spans, would separate them."
    letter = glossary.PLACE[place]
    if f"{place}:otlp" not in seen:
        return (
            f"{letter}'s own spans would show more: point its OTLP exporter at its sidecar (handrail sidecar --otlp-grpc). "
            "If it already does, and clients send no traceparent, give the edge --new-traces sampled."
        )
    if f"{place}:proxy" not in seen:
        return f"An inline sidecar in front of {letter} (handrail sidecar --listen) would narrow it."
    return f"{letter}'s own span does not separate them."


def _stream(row: RequestRow, width: int) -> Iterator[Text]:
    if not row.gap_count or row.gap_max_ns is None:
        return
    figures = [("p50", row.gap_p50_ns), ("p99", row.gap_p99_ns), ("largest", row.gap_max_ns)]
    text = ", ".join(f"{name} {format_duration(value)}" for name, value in figures if value is not None)
    unit = {"token": "gaps between tokens", "chunk": "gaps between chunks (a chunk may hold several tokens)"}
    yield from _prose(f"{row.gap_count} {unit.get(row.gap_unit or '', 'gaps')}: {text}", width, indent=2)


def _findings(row: RequestRow, width: int) -> Iterator[Text]:
    reports: list[tuple[str, str]] = []
    if row.version == 0:
        reports.append(("- provisional: the request is still open; this may change", "yellow"))
    if row.kv_outcome not in (None, "ok", "unknown"):
        reports.append((f"! KV fetch {row.kv_outcome}: {glossary.plain(row.kv_outcome or '', glossary.KV_OUTCOME)}", "red"))
    for finding in row.findings:
        severe = finding.partition(":")[0] in glossary.SEVERE_FINDINGS
        reports.append((f"! {glossary.finding(finding)}", "red" if severe else "yellow"))
    if not row.complete:
        reports.append(("- incomplete: a process on the path sent no evidence", "yellow"))
    reports += [(f"- {hint}: {glossary.plain(hint, glossary.HINT)}", "") for hint in row.hints]
    for text, style in reports:
        yield from _prose(text, width, indent=2, hang=2, style=style)


def _joins(row: RequestRow, width: int) -> Iterator[Text]:
    widest = max((len(join.evidence) for join in row.joins), default=0)
    for join in sorted(row.joins, key=lambda join: (join.how != "opened", _ROLE_ORDER.get(join.evidence.partition(":")[0], 9))):
        text = f"{join.evidence:<{widest}}  {join.span_id:<16}  {glossary.plain(join.how, glossary.JOIN)}"
        yield from _prose(text, width, indent=2, hang=widest + 20)


def _spans(row: RequestRow, spans: Sequence[SpanRow], width: int) -> Iterator[Text]:
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRow]] = {}
    # along the path, then by start: between hosts only the path gives an order (case G03)
    for span in sorted(spans, key=lambda each: (_ROLE_ORDER.get(each.role, 9), each.start_unix_ns, each.span_id)):
        children.setdefault(span.parent_span_id if span.parent_span_id in known else "", []).append(span)

    def walk(parent: str, depth: int) -> Iterator[tuple[int, SpanRow]]:
        for span in children.get(parent, ()):
            yield depth, span
            if span.span_id != parent:
                yield from walk(span.span_id, depth + 1)

    rows = list(walk("", 0))
    name_width = max((len(span.name) + 2 * depth for depth, span in rows), default=0)
    for depth, span in rows:
        offset_ns = span.start_unix_ns - row.started_unix_ns
        offset = f"{'-' if offset_ns < 0 else '+'}{format_duration(abs(offset_ns))}"
        where = " ".join(part for part in (span.role, span.instance) if part)
        text = Text(f"  {'  ' * depth + span.name:<{name_width}} {offset:>9}")
        text.append(f" {format_duration(max(0, span.end_unix_ns - span.start_unix_ns)):>8}")
        text.append("  ERROR" if span.status == _STATUS_ERROR else "", style="red")
        text.append(f"  {where}", style="dim")
        text.truncate(width, overflow="ellipsis")
        yield text


# --- was it slow ----------------------------------------------------------------------------------------------------------


def standstill(row: RequestRow) -> str | None:
    """Describe the pause of an engine's process before the first token.

    None where no process paused, or where nothing shows it.
    """
    pauses = (("P", row.prefill_paused_ns or 0), ("D", row.decode_paused_ns or 0))
    lines = [f"at {name} for {format_duration(ns)}" for name, ns in pauses if ns >= PAUSED_NS]
    if not lines:
        return None
    return f"A process of the engine was paused before the first token (host_pause): {' and '.join(lines)}."


def slowness(baseline: Mapping[str, Any]) -> str:
    """Describe ``baseline``, as docs/http-api.md defines it."""
    if baseline["verdict"] == "cannot_tell":
        known = f"{baseline['compared']:,} similar requests around that time"
        return f"Cannot tell whether that is slow for its size: {known}, {baseline['needed']} needed."
    late, compared = baseline["late_ns"], f"{baseline['compared']:,} around it"
    size = _size(baseline["uncached_tokens"])
    if baseline["verdict"] == "slow":
        return f"{format_duration(late)} longer than usual for {size} ({compared}): {_grown(baseline)}."
    than = f"{format_duration(abs(late))} {'longer' if late > 0 else 'shorter'} than usual"
    beside = f", though {_place(baseline)} took {format_duration(baseline['excess_ns'])} more" if _though(baseline) else ""
    return f"Not slow for {size}: {than}, {format_duration(baseline['baseline_ttft_ns'])} ({compared}){beside}."


def _though(baseline: Mapping[str, Any]) -> bool:
    """Whether a phase grew by more than the whole did.

    Such a phase gets a sentence even where the request was not slow.
    """
    return baseline["phase"] is not None and baseline["excess_ns"] > max(0, baseline["late_ns"])


def _grown(baseline: Mapping[str, Any]) -> str:
    if baseline["phase"] is not None:
        often = ", as in many others at that place and time" if baseline["significant"] else ""
        return f"{_place(baseline)} +{format_duration(baseline['excess_ns'])}{often}"
    if len(baseline["ambiguous"]) > 1:
        at = f" at {baseline['place']}" if baseline["place"] else ""
        return f"{' and '.join(baseline['ambiguous'])}{at} grew by similar amounts, so the cause is ambiguous"
    return "no phase grew by more than its usual variation"


def _place(baseline: Mapping[str, Any]) -> str:
    return f"{baseline['phase']} at {baseline['place']}" if baseline["place"] not in ("", "router") else str(baseline["phase"])


def _size(tokens: int | None) -> str:
    if tokens is None:
        return "prompts of any size (its own size is unknown)"
    return f"{tokens / 1000:.1f}k-token prompts" if tokens >= 1000 else f"{tokens}-token prompts"


# --- text -----------------------------------------------------------------------------------------------------------------


def _fact(name: str, parts: Sequence[str], width: int, *, style: str = "", separator: str = " · ") -> Iterator[Text]:
    """Write ``name`` and its parts.

    A line breaks between parts; it breaks inside a part only where the part is longer than a line.
    """
    kept = separator.join(part.replace(" ", _HARD_SPACE) if len(part) < width - 10 else part for part in parts if part)
    for number, line in enumerate(_wrapped(kept, width - 10)):
        fact = Text(f"  {name if not number else '':<8}", style="dim")
        fact.append(line, style=style or "not dim")
        yield fact


def _prose(text: str, width: int, *, indent: int = 0, hang: int = 0, style: str = "") -> Iterator[Text]:
    kept = _BEFORE_UNIT.sub(_HARD_SPACE, text)
    for number, line in enumerate(_wrapped(kept, width - indent, hang)):
        yield Text(" " * indent + (" " * hang if number else "") + line, style=style)


def _wrapped(text: str, width: int, hang: int = 0) -> list[str]:
    """Wrap the text to ``width`` columns; later lines are shorter by ``hang``.

    Ids are never broken at their hyphens.
    """
    lines = textwrap.wrap(text, width, subsequent_indent=" " * hang, break_on_hyphens=False) or [""]
    return [line.lstrip().replace(_HARD_SPACE, " ") for line in lines]
