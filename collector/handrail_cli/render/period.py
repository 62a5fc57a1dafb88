"""Render the explanation of a period for a terminal.

Sentences come first, then the figures that they rest on, then the commands to type next.
It is a pure function of the answer's JSON, which is the same from a collector and from a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.phases import Phase
from handrail_cli import glossary
from handrail_cli.render.pools import pool_lines
from handrail_cli.tables import FittedColumn, Trimmed, fitted

Plain = Mapping[str, Any]

_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_HINTS: Final = 3
_KEPT: Final = {"p50": 6, "p90": 3, "p99": 9, "p99.9": 9}  # how much each percentile matters, where space is short
_PHASES: Final = 7
_SHARE_OF_NOTE: Final = 0.005
_BAR: Final = 20
_TRACES: Final = 3
_SECOND: Final = 10**9
_IN_DOUBT: Final = "?"
_WHERE: Final = {
    "prefill_host": "P host",
    "decode_host": "D host",
    "link": "link",
    "model": "model",
    "outcome": "outcome",
    "kv_outcome": "KV outcome",
}


def render(answer: Plain, width: int, now_unix_ns: int, zone: tzinfo | None = None) -> RenderableType:
    """Render the whole answer, without ``next_commands``."""
    parts: list[RenderableType] = [_period(answer, now_unix_ns, zone)]
    if not answer["scopes"]:
        parts += [Text(), *_nothing(answer, now_unix_ns, zone)]
    parts += _links(answer)
    for scope in answer["scopes"]:
        parts += [Text(), *_scope(scope, answer, width, now_unix_ns, zone)]
    lines = list(pool_lines(answer.get("pools", ()), width))
    parts += [Text(), *lines] if lines else []
    return Trimmed(Group(*parts))


def render_first(answer: Plain) -> RenderableType:
    """Render the first answer's sentences while the exact answer is computed."""
    parts: list[RenderableType] = []
    for scope in answer["scopes"]:
        parts += [Text(f"{scope['scope']} (first answer, times within 1 %)", style="bold"), *_sentences(scope)]
    return Group(*parts, Spinner("dots", "reading every row for the exact answer; Ctrl-C ends"))


def source_flags(data: Path | None, api: str | None) -> tuple[str, ...]:
    """Return ``--data DIR`` or ``--api URL`` as the user gave it."""
    return ("--data", str(data)) if data is not None else ("--api", api) if api is not None else ()


def _period(answer: Plain, now_unix_ns: int, zone: tzinfo | None) -> Text:
    since, until = answer["since_unix_ns"], answer["until_unix_ns"]
    text = f"{dated(since, until, zone)} ({format_duration(until - since)})"
    model = f" · model {answer['model']}" if answer["model"] else ""
    kind = "exact" if answer["exact"] else f"first answer, from {answer['rolled_hours']} hourly rollups: TTFT within 1 %"
    return Text(f"{text}{model} · {kind}", style="dim")


def _nothing(answer: Plain, now_unix_ns: int, zone: tzinfo | None) -> list[RenderableType]:
    latest = answer["latest_unix_ns"]
    if latest is None:
        return [Text("No request at all is stored: is there traffic, and do the sidecars send here?")]
    if answer["model"] and answer["models"]:
        return [
            Text(f"There is no request of the model {answer['model']!r} in this period, so there is nothing to explain."),
            Text(f"Models of this period, nearest known: {', '.join(answer['models'])}."),
        ]
    return [
        Text("No request of this period fits, so there is nothing to explain."),
        Text(f"The latest request began at {format_time(latest, now_unix_ns, zone)}: try a wider --since."),
    ]


def _links(answer: Plain) -> list[RenderableType]:
    """Render the links that are slow or take much of the TTFT.

    They show even where the slowest requests have no more of them: a slow link may slow down all requests alike.
    """
    links = answer.get("links", ())
    if not links:
        return []
    return [Text(), *(Text(each, style="bold yellow" if " is slow: " in each else "") for each in links)]


def _scope(scope: Plain, answer: Plain, width: int, now_unix_ns: int, zone: tzinfo | None) -> Iterator[RenderableType]:
    yield Text.assemble((scope["scope"], "bold"), (f"  {glossary.plain(scope['scope'], glossary.SCOPE)}", "dim"))
    yield from _sentences(scope)
    yield Text()
    yield _figures(scope, width)
    tail = scope["ttft"]
    if tail is not None and tail["verdict"] != "cannot_tell":
        yield from _causes(tail, width, now_unix_ns, zone)
        yield from _phases(tail, width)
        yield from _contrasts(tail["concentrations"], width, "What the slowest have more of", "slowest 1 %", "middle half")
    if scope["gap"] is not None and any(each["stands_out"] for each in scope["gap"]["concentrations"]):
        yield from _contrasts(
            scope["gap"]["concentrations"], width, "What streams with the longest gaps have more of", "longest 1 %", "middle half"
        )
    if scope.get("stalls") is not None:
        yield from _stalls(scope["stalls"], width)
    if scope["failures"]["requests"]:
        yield from _contrasts(scope["failures"]["concentrations"], width, "What failed requests have more of", "failed", "others")
    if scope["failures"]["by_kv_outcome"]:
        text = ", ".join(f"{count:,} {name}" for name, count in scope["failures"]["by_kv_outcome"].items())
        yield Text(f"\n  KV outcomes other than ok: {text}")


def _sentences(scope: Plain) -> list[RenderableType]:
    first, *rest = scope["summary"]
    stands_out = scope["ttft"] is not None and scope["ttft"]["verdict"] == "stands_out"
    failed = 2 * scope["failures"]["requests"] >= scope["requests"]
    style = "bold red" if failed else "bold yellow" if stands_out else "bold"
    return [_indented(Text(first, style=style)), *(_indented(Text(each)) for each in rest)]


def _figures(scope: Plain, width: int) -> RenderableType:
    columns = [FittedColumn("", right=False), FittedColumn("count", 2), *(FittedColumn(p, _KEPT[p]) for p in _PERCENTILES)]
    rows: list[list[Text | str]] = []
    for name, count, values in (
        ("TTFT", scope["timed"], scope["ttft_ns"]),
        ("stream gaps (within 1 %)", scope["gaps"], scope["gap_ns"]),
    ):
        shown = [_quantile(values.get(p), count, rank) for p, rank in _PERCENTILES.items()]
        rows.append([name, f"{count:,}", *shown])
    return fitted(columns, rows, width)


def _quantile(value_ns: int | None, count: int, rank: float) -> Text:
    """Render a percentile; it is in doubt with fewer than ten values beyond it.

    The text then shows the doubt.
    """
    if value_ns is None:
        return Text("–", style="dim")
    doubtful = count * (1 - rank) < 9.999
    return Text(format_duration(value_ns) + (_IN_DOUBT if doubtful else ""), style="dim" if doubtful else "")


def _causes(tail: Plain, width: int, now_unix_ns: int, zone: tzinfo | None) -> Iterator[RenderableType]:
    causes = tail["causes"]
    if causes is None or not causes["named"]:
        return
    yield Text("\n  Causes of the slowest, one by one", style="bold")
    columns = [
        FittedColumn("requests"),
        FittedColumn("share", 6),
        FittedColumn("cause", right=False),
        FittedColumn("at", right=False),
        FittedColumn("longer by"),
        FittedColumn("typical", 3),
        FittedColumn("started between", 4, right=False),
    ]
    rows: list[list[Text | str]] = []
    for named in causes["named"]:
        times = " and ".join(_when(named[each], now_unix_ns, zone) for each in ("first_unix_ns", "last_unix_ns"))
        rows.append(
            [
                f"{named['requests']:,}",
                _percent(named["share"]),
                Text(named.get("why") or named["phase"], style="yellow"),
                named["place"] or "not known",
                format_duration(named["excess_ns"]),
                "" if named.get("why") else format_duration(named["baseline_ns"]),
                Text(times, style="dim"),
            ]
        )
    for count, what in ((causes["ambiguous"], "two grew alike"), (causes["at_base_rate"], "nothing unusual")):
        if count:
            rows.append([f"{count:,}", _percent(count / causes["slow"]), Text(what, style="dim"), *[""] * 4])
    yield fitted(columns, rows, width)


def _phases(tail: Plain, width: int) -> Iterator[RenderableType]:
    grown = [phase for phase in tail["phases"] if abs(phase["share"]) >= _SHARE_OF_NOTE][:_PHASES]
    if not grown:
        return
    yield Text(f"\n  Where the {format_duration(tail['excess_ns'])} lie (means)", style="bold")
    columns = [
        FittedColumn("phase", right=False),
        FittedColumn("middle half", 4),
        FittedColumn("slowest 1 %", 3),
        FittedColumn("more"),
        FittedColumn("share", 8),
        FittedColumn("", 1, right=False),
    ]
    rows = []
    for phase in grown:
        place = {"prefill": " (P)", "decode": " (D)", "path": " (path)"}.get(phase["place"], "")
        unattributed = phase["phase"] == Phase.UNATTRIBUTED.value
        glyph = "░" if unattributed else "█"
        rows.append(
            [
                Text(phase["phase"] + place, style="dim" if unattributed else ""),
                format_duration(phase["baseline_ns"]),
                format_duration(phase["slow_ns"]),
                _signed(phase["excess_ns"]),
                _percent(phase["share"]),
                glyph * max(0, min(_BAR, round(phase["share"] * _BAR))),
            ]
        )
    yield fitted(columns, rows, width)


def _stalls(stalls: Plain, width: int) -> Iterator[RenderableType]:
    yield Text("\n  Why streams stood still (the longest stalls of each)", style="bold")
    columns = [
        FittedColumn("cause", right=False),
        FittedColumn("stalls"),
        FittedColumn("share", 7),
        FittedColumn("of the longest", 5),
        FittedColumn("events", 6),
        FittedColumn("one every", 2),
        FittedColumn("in all", 4),
        FittedColumn("times as often", 3),
        FittedColumn("most at", 5, right=False),
    ]
    rows: list[list[Text | str]] = []
    for each in stalls["causes"]:
        unknown = each["cause"] == "unknown"
        rows.append(
            [
                Text(each["cause"], style="dim" if unknown else "yellow"),
                f"{each['stalls']:,}",
                _percent(each["share"]),
                "" if each["longest_share"] is None else _percent(each["longest_share"]),
                f"{each['events']:,}",
                "" if each["every_ns"] is None else format_duration(each["every_ns"]),
                format_duration(each["gap_ns"]),
                "" if each["lift"] is None else _times(each["lift"]),
                f"{each['host']} ({_percent(each['host_share'])})" if each["host"] else "",
            ]
        )
    yield fitted(columns, rows, width)


def _times(lift: float) -> str:
    return f"{lift:,.0f}" if lift >= 10 else f"{lift:.1f}"


def _contrasts(found: Sequence[Plain], width: int, title: str, query: str, others: str) -> Iterator[RenderableType]:
    """Render the contrasts that stand out, else those that perhaps do.

    The others are noise: a period may have thousands of hosts.
    """
    shown = [each for each in found if each["stands_out"]] or [each for each in found if each["above_chance"]][:_HINTS]
    if not shown:
        return
    note = "" if any(each["stands_out"] for each in shown) else ": nothing clearly"
    yield Text(f"\n  {title}{note}", style="bold")
    columns = [
        FittedColumn("", right=False),
        FittedColumn("", right=False),
        FittedColumn(query),
        FittedColumn(others, 7),
        FittedColumn("times (99.9 % interval)", 5),
    ]
    rows = []
    for each in shown:
        mark = Text("▶ " if each["stands_out"] else "  ", style="yellow")
        rows.append(
            [
                mark + Text(_WHERE[each["dimension"]]),
                each["value"],
                f"{each['cases']:,} · {_percent(each['cases_share'])}",
                f"{each['controls']:,} · {_percent(each['controls_share'])}",
                _lift(each),
            ]
        )
    yield fitted(columns, rows, width)


def _lift(contrast: Plain) -> str:
    if contrast["lift"] is None:
        return "only these"
    return f"{contrast['lift']:.2g} ({contrast['low']:.2g}–{contrast['high']:.2g})"


def next_commands(answer: Plain, flags: Sequence[str] = ()) -> list[str]:
    """Return commands that look further.

    They show a typical request of each cause, and lists. ``flags`` name the source.
    """
    source = "".join(f" {flag}" for flag in flags)
    lines = []
    for scope in answer["scopes"]:
        causes = (scope["ttft"] or {}).get("causes") or {"named": (), "examples": ()}
        for named in causes["named"][:_TRACES]:
            where, cause = named["place"] or "a place not known", named.get("why") or named["phase"]
            lines.append(f"handrail trace {named['examples'][0]}{source}    # {cause} at {where}")
        if not causes["named"] and causes["examples"]:
            lines.append(f"handrail trace {causes['examples'][0]}{source}    # a typical one of the slowest, {scope['scope']}")
    until = -(-answer["until_unix_ns"] // _SECOND) * _SECOND
    times = f" --since {_utc(answer['since_unix_ns'])} --until {_utc(until)}"
    lines.append(f"handrail requests --sort ttft{times}{source}")
    lines += [f"handrail links{times}{source}"] if answer.get("links") else []
    failed = next((name for scope in answer["scopes"] for name in scope["failures"]["by_outcome"]), None)
    return lines + ([f"handrail requests --outcome {failed}{times}{source}"] if failed else [])


def _utc(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns // _SECOND, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _when(unix_ns: int, now_unix_ns: int, zone: tzinfo | None) -> str:
    return format_time(unix_ns, now_unix_ns, zone).partition(".")[0]


def dated(since_unix_ns: int, until_unix_ns: int, zone: tzinfo | None) -> str:
    """Format both ends of a period with their date and zone.

    An equal date is not repeated.
    """
    since, until = (datetime.fromtimestamp(at // _SECOND, zone).astimezone(zone) for at in (since_unix_ns, until_unix_ns))
    end = f"{until:%H:%M:%S}" if since.date() == until.date() else f"{until:%Y-%m-%d %H:%M:%S}"
    offset = f"{until:%z}"
    text = "" if offset == "+0000" else f"{offset[:3]}:{offset[3:5]}"
    return f"{since:%Y-%m-%d %H:%M:%S} to {end} UTC{text}"


def _signed(duration_ns: int) -> str:
    return f"{'−' if duration_ns < 0 else '+'}{format_duration(abs(duration_ns))}"


def _percent(share: float) -> str:
    per_cent = 100 * share
    if 0 < per_cent < 0.1:
        return "<0.1 %"
    text = f"{per_cent:.0f} %" if abs(per_cent) >= 9.95 or not per_cent else f"{per_cent:.1f} %"
    return text.replace("-", "−")  # the same minus sign as in the durations beside it


def _indented(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 0, 2), expand=False)
