"""Render the explanation of a period for a terminal.

Sentences come first, then the figures that they rest on, then the commands to type next.
It is a pure function of the answer's JSON, which is the same from a collector and from a folder.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone, tzinfo
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.spinner import Spinner
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail.phases import Phase
from handrail_cli import glossary
from handrail_cli.tables import Column, duration, table

Plain = Mapping[str, Any]
T = TypeVar("T")

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

_BOUND: Final = {
    "compute_bound": "compute-bound",
    "memory_bound": "memory-bound",
    "balanced": "balanced between compute and memory",
    "unknown": "unknown whether compute-bound or memory-bound",
}
_UNDER: Final = " " * 14


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
    return Group(*parts)


def render_first(answer: Plain) -> RenderableType:
    """Render the first answer's sentences while the exact answer is computed."""
    parts: list[RenderableType] = []
    for scope in answer["scopes"]:
        parts += [Text(f"{scope['scope']} (first answer, times within 1 %)", style="bold"), *_sentences(scope)]
    return Group(*parts, Spinner("dots", "reading all rows for the exact answer; Ctrl-C stops"))


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
        return [Text("No request is stored. Check that there is traffic, and that the sidecars send here (--collector).")]
    if answer["model"] and answer["models"]:
        return [
            Text(f"There is no request of the model {answer['model']!r} in this period, so there is nothing to explain."),
            Text(f"Models of this period, nearest known: {', '.join(answer['models'])}."),
        ]
    return [
        Text("No request in this period matches, so there is nothing to explain."),
        Text(f"The latest request began at {format_time(latest, now_unix_ns, zone)}: try an earlier --since."),
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


def pool_lines(pools: Sequence[Plain], width: int) -> Iterator[Text]:
    """Write the lines of the pools.

    Nothing where no pool has sampled GPUs: a line would be the same every time.
    """
    if not any(pool["gpus"] or pool["shared"] for pool in pools):
        return
    yield Text("Pools of GPUs", style="bold")
    for pool in pools:
        line = Text(f"  {pool['role']:<11} ")
        line.append(str(_BOUND.get(pool["bound"], pool["bound"])), style="bold" if pool["bound"] != "unknown" else "dim")
        line.append(f"  {_gpus(pool)}".rstrip(), style="dim")
        yield line
        for part in textwrap.wrap(_pool_evidence(pool), width - len(_UNDER)):
            yield Text(f"{_UNDER}{part}", style="dim")


def _gpus(pool: Plain) -> str:
    if not pool["gpus"]:
        return ""
    hosts = f" on {pool['hosts']} host{'s' if pool['hosts'] > 1 else ''}"
    return f"{pool['gpus']} × {', '.join(pool['products']) or 'GPU'}{hosts}"


def _pool_evidence(pool: Plain) -> str:
    if pool["how"] == "measured":
        busy = f", busy {_percent(pool['busy'])} of the time" if pool["busy"] is not None else ""
        return f"measured: tensor {_percent(pool['tensor'])}, DRAM {_percent(pool['dram'])} while busy{busy}"
    if pool["how"] == "estimated":
        return (
            f"estimated: {pool['tokens_a_step']:,.0f} tokens a step are at most {pool['intensity']:,.0f} operations a byte, "
            f"the GPU's ridge is at {pool['ridge']:,.0f} (dense weights of 2 bytes, KV reads left out)"
        )
    return str(pool["why"])


def _sentences(scope: Plain) -> list[RenderableType]:
    first, *rest = scope["summary"]
    stands_out = scope["ttft"] is not None and scope["ttft"]["verdict"] == "stands_out"
    failed = 2 * scope["failures"]["requests"] >= scope["requests"]
    style = "bold red" if failed else "bold yellow" if stands_out else "bold"
    return [_indented(Text(first, style=style)), *(_indented(Text(each)) for each in rest)]


def _figures(scope: Plain, width: int) -> RenderableType:
    rows = (("TTFT", scope["timed"], scope["ttft_ns"]), ("stream gaps (within 1 %)", scope["gaps"], scope["gap_ns"]))
    columns: list[Column[tuple[str, int, Plain]]] = [
        Column("", lambda row: row[0]),
        Column("count", lambda row: f"{row[1]:,}", 2, right=True),
        *(Column(name, _percentile(name, rank), _KEPT[name], right=True) for name, rank in _PERCENTILES.items()),
    ]
    return table(columns, rows, width, indent=2)


def _percentile(name: str, rank: float) -> Callable[[tuple[str, int, Plain]], Text]:
    return lambda row: _quantile(row[2].get(name), row[1], rank)


def _quantile(value_ns: int | None, count: int, rank: float) -> Text:
    """Render a percentile; it shows a doubt where fewer than ten values lie beyond it."""
    if value_ns is None or count * (1 - rank) >= 9.999:
        return duration(value_ns)
    return Text(format_duration(value_ns) + _IN_DOUBT, style="dim")


def _causes(tail: Plain, width: int, now_unix_ns: int, zone: tzinfo | None) -> Iterator[RenderableType]:
    causes = tail["causes"]
    if causes is None or not causes["named"]:
        return
    yield Text("\n  Causes of the slowest requests", style="bold")
    rest = ((causes["ambiguous"], "ambiguous"), (causes["at_base_rate"], "nothing unusual"))
    others = [{"requests": count, "share": count / causes["slow"], "what": what} for count, what in rest if count]

    def started(each: Plain) -> Text:
        ends = [_when(each[name], now_unix_ns, zone) for name in ("first_unix_ns", "last_unix_ns") if name in each]
        return Text(" and ".join(ends), style="dim")

    columns = [
        Column[Plain]("requests", lambda each: f"{each['requests']:,}", right=True),
        Column("share", lambda each: _percent(each["share"]), 6, right=True),
        Column("cause", lambda each: Text(each["what"], "dim") if "what" in each else Text(_cause(each), "yellow")),
        Column("at", lambda each: each["place"] or "unknown" if "place" in each else ""),
        Column("longer by", lambda each: format_duration(each["excess_ns"]) if "place" in each else "", right=True),
        Column("typical", lambda each: format_duration(each["baseline_ns"]) if each.get("why") == "" else "", 3, right=True),
        Column("started between", started, 4),
    ]
    yield table(columns, [*causes["named"], *others], width, indent=2)


def _cause(named: Plain) -> str:
    return str(named.get("why") or named["phase"])


def _phases(tail: Plain, width: int) -> Iterator[RenderableType]:
    grown = [phase for phase in tail["phases"] if abs(phase["share"]) >= _SHARE_OF_NOTE][:_PHASES]
    if not grown:
        return
    yield Text(f"\n  Where the extra {format_duration(tail['excess_ns'])} went (means)", style="bold")
    columns = [
        Column[Plain]("phase", lambda phase: Text(_phase(phase), style="dim" if _unattributed(phase) else "")),
        Column("middle half", lambda phase: format_duration(phase["baseline_ns"]), 4, right=True),
        Column("slowest 1 %", lambda phase: format_duration(phase["slow_ns"]), 3, right=True),
        Column("more", lambda phase: _signed(phase["excess_ns"]), right=True),
        Column("share", lambda phase: _percent(phase["share"]), 8, right=True),
        Column("", _share_bar, 1),
    ]
    yield table(columns, grown, width, indent=2)


def _phase(phase: Plain) -> str:
    place = {"prefill": " (P)", "decode": " (D)", "path": " (path)"}.get(phase["place"], "")
    return f"{phase['phase']}{place}"


def _unattributed(phase: Plain) -> bool:
    return bool(phase["phase"] == Phase.UNATTRIBUTED.value)


def _share_bar(phase: Plain) -> str:
    glyph = "░" if _unattributed(phase) else "█"
    columns: int = round(phase["share"] * _BAR)
    return glyph * max(0, min(_BAR, columns))


def _stalls(stalls: Plain, width: int) -> Iterator[RenderableType]:
    yield Text("\n  Why streams stalled (the longest stalls of each)", style="bold")
    columns = [
        Column[Plain]("cause", lambda each: Text(each["cause"], "dim" if each["cause"] == "unknown" else "yellow")),
        Column("stalls", lambda each: f"{each['stalls']:,}", right=True),
        Column("share", lambda each: _percent(each["share"]), 7, right=True),
        Column("of the longest", lambda each: _known(each["longest_share"], _percent), 5, right=True),
        Column("events", lambda each: f"{each['events']:,}", 6, right=True),
        Column("one every", lambda each: _known(each["every_ns"], format_duration), 2, right=True),
        Column("total", lambda each: format_duration(each["gap_ns"]), 4, right=True),
        Column("times as often", lambda each: _known(each["lift"], _times), 3, right=True),
        Column("most at", lambda each: f"{each['host']} ({_percent(each['host_share'])})" if each["host"] else "", 5),
    ]
    yield table(columns, stalls["causes"], width, indent=2)


def _known(value: T | None, formatted: Callable[[T], str]) -> str:
    return "" if value is None else formatted(value)


def _times(lift: float) -> str:
    return f"{lift:,.0f}" if lift >= 10 else f"{lift:.1f}"


def _contrasts(found: Sequence[Plain], width: int, title: str, query: str, others: str) -> Iterator[RenderableType]:
    """Render the contrasts that stand out, else those that perhaps do.

    The others are noise: a period may have thousands of hosts.
    """
    shown = [each for each in found if each["stands_out"]] or [each for each in found if each["above_chance"]][:_HINTS]
    if not shown:
        return
    note = "" if any(each["stands_out"] for each in shown) else ": nothing significant"
    yield Text(f"\n  {title}{note}", style="bold")
    columns = [
        Column[Plain]("", _marked),
        Column("", lambda each: each["value"]),
        Column(query, lambda each: f"{each['cases']:,} · {_percent(each['cases_share'])}", right=True),
        Column(others, lambda each: f"{each['controls']:,} · {_percent(each['controls_share'])}", 7, right=True),
        Column("times (99.9 % interval)", _lift, 5, right=True),
    ]
    yield table(columns, shown, width, indent=2)


def _marked(contrast: Plain) -> Text:
    return Text("▶ " if contrast["stands_out"] else "  ", style="yellow") + Text(_WHERE[contrast["dimension"]])


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
            where, cause = named["place"] or "an unknown place", _cause(named)
            lines.append(f"handrail trace {named['examples'][0]}{source}    # {cause} at {where}")
        if not causes["named"] and causes["examples"]:
            lines.append(f"handrail trace {causes['examples'][0]}{source}    # a typical slow one, {scope['scope']}")
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
