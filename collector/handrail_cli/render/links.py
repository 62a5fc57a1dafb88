"""Render links for a terminal: a table, then each link's evidence and findings.

Pure, from JSON.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from datetime import tzinfo
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from handrail.durations import format_duration, format_time
from handrail_cli.formatting import counted, format_bytes
from handrail_cli.render.period import dated
from handrail_cli.tables import NONE, Column, duration, table

Plain = Mapping[str, Any]

_GB: Final = 1e9
_DOUBTFUL: Final = 1000  # fewer than ten of this many lie beyond the 99th percentile
_INDENT: Final = "    "


def render_links(answer: Plain, width: int, now_unix_ns: int, zone: tzinfo | None = None) -> RenderableType:
    """Render the whole answer."""
    parts: list[RenderableType] = [_period(answer, zone)]
    if not answer["links"]:
        return Group(*parts, Text(), *_nothing(answer, now_unix_ns, zone))
    parts += [Text(), table(_COLUMNS, answer["links"], width, indent=2)]
    if answer["other"] is not None:
        parts.append(_other(answer["other"]))
    for link in answer["links"]:
        parts += [Text(), *_transport_text(link, width)]
    return Group(*parts)


def _period(answer: Plain, zone: tzinfo | None) -> Text:
    since, until = answer["since_unix_ns"], answer["until_unix_ns"]
    count = f"{'the last ' if answer['limited'] else ''}{counted(answer['kv_fetches'], 'KV fetch', 'KV fetches')}"
    return Text(f"{dated(since, until, zone)} ({format_duration(until - since)}) · {count}", style="dim")


def _other(other: Plain) -> Text:
    slow = f", {other['slow']} of them slow" if other["slow"] else ""
    moved = format_bytes(other["moved_bytes"])
    return Text(f"  and {other['links']} more (--limit){slow}: {other['kv_fetches']:,} KV fetches, {moved}", style="dim")


def _nothing(answer: Plain, now_unix_ns: int, zone: tzinfo | None) -> list[RenderableType]:
    latest = answer["latest_unix_ns"]
    if latest is None:
        hint = "The plugin in the engines reports KV fetches: pip install handrail there and set HANDRAIL_SOCKET."
        return [Text("No KV fetch is stored, so no link is known."), Text(hint)]
    return [
        Text("No KV fetch in this period matches, so there is no link to show."),
        Text(f"The latest one began at {format_time(latest, now_unix_ns, zone)}: try an earlier --since."),
    ]


def _name(link: Plain) -> str:
    return f"{link['producer']} → {link['consumer']}{' (back)' if link['backwards'] else ''}"


def _rate(link: Plain) -> str:
    low, high = link["rate_low"], link["rate_high"]
    if low is None:
        return "–"
    if high is None:
        return f"≥ {_gigabytes(low)}"
    return f"{_gigabytes(low)}–{_gigabytes(high)}" if high > 1.1 * low else _gigabytes(link["rate"])


def _gigabytes(rate: float) -> str:
    value = rate / _GB
    return f"{value:.0f} GB/s" if value >= 100 else f"{value:.1f} GB/s" if value >= 10 else f"{value:.2f} GB/s"


def _kv_fetches(link: Plain) -> Text:
    failed = f" ({link['failed']:,} failed)" if link["failed"] else ""
    return Text(f"{link['kv_fetches']:,}{failed}", style="red" if failed else "")


def _share(link: Plain) -> Text | str:
    share = link["share_of_line"]
    return NONE if share is None else f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def _p99(link: Plain) -> Text:
    transfer = link["transfer"]
    if transfer is None or transfer["count"] >= _DOUBTFUL:
        return duration(transfer and transfer["p99_ns"])
    return Text(f"{format_duration(transfer['p99_ns'])}?", style="dim")


_COLUMNS: Final[tuple[Column[Plain], ...]] = (
    Column[Plain]("", lambda link: Text("▶" if link["findings"] else "", style="yellow")),
    Column("link", _name),
    Column("KV fetches", _kv_fetches, 5, right=True),
    Column("moved", lambda link: format_bytes(link["moved_bytes"] or None), 4, right=True),
    Column("transfer rate", lambda link: Text(_rate(link), style="yellow" if link["slow"] else ""), right=True),
    Column("line rate", lambda link: _gigabytes(link["line_rate"]) if link["line_rate"] else NONE, 6, right=True),
    Column("share", _share, 7, right=True),
    Column("median", lambda link: duration(link["transfer"] and link["transfer"]["p50_ns"]), 8, right=True),
    Column("p99", _p99, 3, right=True),
    Column("transport", lambda link: Text(link["transport"], style="dim" if link["transport"] == "unknown" else "")),
)


def _transport_text(link: Plain, width: int) -> Iterator[RenderableType]:
    """Render the link's findings, and its transport with the evidence for it."""
    how = ", ".join(filter(None, (*link["connectors"], *link["modes"])))
    yield Text.assemble((_name(link), "bold"), (f"  {how}" if how else "", "dim"))
    for finding in link["findings"]:
        yield from _wrapped(f"▶ {finding['kind']}  {finding['seen']}", width, "yellow" if link["slow"] else "")
        if finding["advice"]:
            yield from _wrapped(f"  {finding['advice']}", width, "")
    for evidence in link["evidence"]:
        yield from _wrapped(f"evidence: {evidence}", width, "dim")
    for other in link["examined"]:
        yield from _wrapped(other, width, "dim")
    if not link["bytes_counted"] and link["moved_bytes"]:
        yield from _wrapped("bytes: size of the blocks, since the transport did not count bytes", width, "dim")
    for device in link["devices"]:
        if device["carried"] and device["peak"]:
            way, peak = max(device["peak"].items(), key=lambda each: float(each[1]))
            rates = f"{_gigabytes(device['mean'][way])} on average, {_gigabytes(peak)} in the busiest second"
            yield from _wrapped(f"{device['device']} at {device['host']}: {way} {rates}", width, "dim")


def _wrapped(text: str, width: int, style: str) -> Iterator[Text]:
    lines = textwrap.wrap(text, max(40, width - len(_INDENT)), subsequent_indent="  ", break_on_hyphens=False)
    for line in lines:
        yield Text(f"{_INDENT}{line}", style=style)
