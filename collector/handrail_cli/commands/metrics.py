"""Read the metrics page of an engine or a router as the sidecar reads it.

It prints the figures in one schema and in base units, and what the page lacks.

examples:
  handrail metrics http://127.0.0.1:8200/metrics --role decode
  handrail metrics saved-page.txt --engines 4 --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from handrail.durations import format_duration
from handrail.records import EngineHistogram, EngineSample, EngineValue, Process, Role, SchemaNote, SchemaState
from handrail.records.quantities import BY_NAME
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import format_bytes
from handrail_cli.sanitize import print_document
from handrail_sidecar.engine_metrics.checks import Expected, page_notes
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.engine_metrics.exposition import families_of
from handrail_sidecar.engine_metrics.histogram import LimitSide, Quantile, mean, quantile, saturated_share
from handrail_sidecar.engine_metrics.page import PageReader, PageReading
from handrail_sidecar.engine_metrics.report import schema_notes
from handrail_sidecar.settings import ROLES

_PIPE_WIDTH: Final = 160
_SHARES: Final = (0.5, 0.9, 0.99)
_UNKNOWN: Final = "unknown"
_STATES: Final = {
    SchemaState.MISSING: "not exported",
    SchemaState.RENAMED: "another version's name",
    SchemaState.BOTH: "two names, the newer is read",
    SchemaState.UNIT_CHANGED: "another unit, converted",
    SchemaState.UNKNOWN: "perhaps renamed, not read",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail metrics``."""
    parser.add_argument("page", metavar="URL|FILE", help="address of the page, or a file that holds one")
    parser.add_argument("--role", choices=[role.value for role in ROLES], help="role of the process; it decides what is normal")
    parser.add_argument("--engines", metavar="N", type=int, help="expected number of data-parallel engines")
    parser.add_argument("--agents", metavar="N", type=int, help="expected number of transport agents (ranks)")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=10.0, help="longest wait for an answer (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0, also where the page has flaws: they are the answer."""
    page = _page(arguments.page, arguments.timeout)
    reading = PageReader().read(page)
    emitters, schema = schema_notes(families_of(page))
    if not reading.values and not reading.histograms:
        families = len(families_of(page))
        raise CliError(
            what=f"the page holds no known metric family ({families} unknown ones)" if families else "this is no metrics page",
            where=arguments.page,
            valid="a page of vLLM, SGLang, vllm-router, NIXL, Mooncake, LMCache, Dynamo or TensorRT-LLM",
        )
    role = Role(arguments.role) if arguments.role else Role.UNKNOWN
    sample = _sample(reading, role)
    expected = Expected(role=role, engines=arguments.engines, agents=arguments.agents)
    notes = list(page_notes(sample, reading, expected))
    if arguments.json:
        print_document({**_json(sample, emitters, schema), "notes": [asdict(note) for note in notes]})
        return EXIT_OK
    _print(sample, emitters, schema, [note.text for note in notes], role)
    return EXIT_OK


def _page(where: str, timeout_s: float) -> bytes:
    """Return the page's bytes.

    Raises ``CliError``.
    """
    if "://" not in where:
        try:
            return Path(where).read_bytes()
        except OSError as error:
            valid = "a file, or an address such as http://127.0.0.1:8200/metrics"
            raise CliError(what=f"cannot be read: {error.strerror}", where=where, valid=valid, exit_code=EXIT_USAGE) from None
    from handrail_sidecar.sources.engine_metrics import MetricsSettings, NoPageError, fetch_once

    try:
        return asyncio.run(fetch_once(MetricsSettings(url=where, timeout_s=timeout_s)))
    except NoPageError as problem:
        raise CliError(what=str(problem), where=where, valid="the engine's own /metrics, http or https") from None


def _sample(reading: PageReading, role: Role) -> EngineSample:
    from handrail_sidecar.sources.engine_metrics import sample_of

    return sample_of(reading, Process(role=role, instance="", host=""), time.time_ns(), CounterTracks())


# --- JSON -----------------------------------------------------------------------------------------------------------------


def _json(sample: EngineSample, emitters: tuple[str, ...], schema: tuple[SchemaNote, ...]) -> dict[str, Any]:
    return {
        "emitters": list(emitters),
        "model": sample.model,
        "values": [
            {"name": each.name, "engine": each.engine, "label": each.label, "value": each.value, "unit": BY_NAME[each.name].unit}
            for each in sample.values
        ],
        "histograms": [_histogram_json(each) for each in sample.histograms],
        "schema": [{**asdict(note), "state": note.state.value} for note in schema],
    }


def _histogram_json(each: EngineHistogram) -> dict[str, Any]:
    found = {share: quantile(each, share) for share in _SHARES}
    return {
        "name": each.name,
        "engine": each.engine,
        "label": each.label,
        "unit": BY_NAME[each.name].unit,
        "count": each.count,
        "mean": mean(each),
        "share_above_last_bucket": saturated_share(each),
        "quantiles": {
            f"p{share * 100:g}": None if q is None else {**asdict(q), "side": q.side.value} for share, q in found.items()
        },
    }


# --- for a person ---------------------------------------------------------------------------------------------------------


def _print(sample: EngineSample, emitters: tuple[str, ...], schema: tuple[SchemaNote, ...], notes: list[str], role: Role) -> None:
    from rich.text import Text

    from handrail_cli.console import answer_console
    from handrail_cli.tables import Column, table

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(Text(", ".join(emitters) + (f"  model {sample.model}" if sample.model else ""), style="bold"))
    first = {each.name: each for each in reversed(sample.values)}  # a name is written once
    values = [
        Column[EngineValue]("quantity", lambda each: each.name if each is first[each.name] else ""),
        Column("engine", lambda each: each.engine),
        Column("label", lambda each: each.label),
        Column("value", lambda each: _number(each.value), right=True),
        Column("unit", lambda each: _unit(each.name)),
    ]
    histograms = [
        Column[EngineHistogram]("distribution", lambda each: each.name),
        Column("engine", lambda each: each.engine),
        Column("label", lambda each: each.label),
        Column("samples", lambda each: f"{each.count:,}", right=True),
        Column("mean", lambda each: _mean(each, role), right=True),
        *(Column(f"p{share * 100:g}", _quantile_of(share), right=True) for share in _SHARES),
    ]
    if sample.values:
        console.print()
        console.print(table(values, sample.values, console.width))
    if sample.histograms:
        console.print()
        console.print(table(histograms, sample.histograms, console.width))
        console.print(Text("≤: in the lowest bucket; >: above the last one; ~: interpolated between two bounds", style="dim"))
    if schema or notes:
        console.print()
    for note in schema:
        console.print(Text.assemble((f"{_STATES[note.state]}: ", "yellow"), _seen(note)))
    for text in notes:
        console.print(Text.assemble(("note: ", "yellow"), text))


def _mean(each: EngineHistogram, role: Role) -> str:
    average = mean(each)
    if not each.count:
        return "not applicable" if role is Role.PREFILL and each.name == "inter_token_seconds" else "–"
    return _UNKNOWN if average is None else _amount(each.name, average)


def _quantile_of(share: float) -> Callable[[EngineHistogram], str]:
    def cell(each: EngineHistogram) -> str:
        if not each.count:
            return "–"
        if mean(each) is None and share != _SHARES[0]:  # the sum is invalid, so some of the samples are too
            return _UNKNOWN
        return _quantile(each.name, quantile(each, share))

    return cell


def _quantile(name: str, found: Quantile | None) -> str:
    if found is None:
        return "–"
    if found.side is LimitSide.ABOVE:
        return f"> {_amount(name, found.low)}"
    if found.side is LimitSide.AT_MOST:
        return f"≤ {_amount(name, found.high or 0.0)}"
    return f"~ {_amount(name, found.value or 0.0)}"


def _amount(name: str, value: float) -> str:
    if BY_NAME[name].unit == "s":
        return format_duration(round(value * 1e9))
    if BY_NAME[name].unit == "By":
        return format_bytes(value)
    return f"{value:,.4g}"


def _number(value: float) -> str:
    if value.is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 1000 else f"{value:.4g}"


def _unit(name: str) -> str:
    unit = BY_NAME[name].unit
    return {"1": "ratio", "By": "bytes", "s": "s"}.get(unit, unit.strip("{}") + "s")


def _seen(note: SchemaNote) -> str:
    if not note.seen:
        return note.expected
    return f"{note.seen} (expected {note.expected})" if note.expected else note.seen
