"""Compare what Handrail measured under an injected fault with what truly happened.

Serves ``handrail demo --fault``, for a fleet over real sockets.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from handrail.durations import format_duration
from handrail.phases import ORDER, Phase
from handrail_cli.errors import EXIT_USAGE, CliError
from handrail_collector.rows import RequestRow
from handrail_sim.demo.figures import phases_p50
from handrail_sim.emulator import load, scenario, truth, truth_log
from handrail_sim.emulator.faults import FAULTS, Fault, FaultError, parse
from handrail_sim.emulator.truth import RequestTruth

SCENARIO: Final = "split"  # the demo's engines: two prefill hosts, p0 and p1, and two decode hosts, d0 and d1
_CLOCKS: Final = ("clock_offset", "clock_drift")
# true phases for which Handrail has one name
_OUTSIDE: Final = (truth.TruePhase.ROUTER, truth.TruePhase.HOPS, truth.TruePhase.PREFILL_ABANDONED)


def checked(texts: Sequence[str]) -> list[tuple[str, Fault]]:
    """Parse the faults and return each with its text. Raises ``CliError``."""
    return [(text, _fault(text)) for text in texts]


def _fault(text: str) -> Fault:
    try:
        fault = parse(text, scenario.load(SCENARIO).hosts())
    except FaultError as error:
        near = tuple(get_close_matches(text.partition(":")[0], FAULTS, n=3))
        raise _usage(str(error), "--fault NAME:PLACE:SIZE[@FROM-TO] (docs/fleet.md)", near) from None
    if fault.name in _CLOCKS and fault.place in ("edge", "*"):
        what = f"--fault {fault.name}: over sockets the sidecars keep this machine's clock, the edge's too"
        raise _usage(what, "an engine's host or the router, whose spans it stamps; or virtual time: --scenario")
    return fault


def _usage(what: str, valid: str, nearest: tuple[str, ...] = ()) -> CliError:
    return CliError(what=what, where="--fault", valid=valid, nearest=nearest, exit_code=EXIT_USAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault and the requests that passed its place.

    Phases are Handrail's, as p50 in ms.
    ``told``: Handrail's figures for these requests.
    ``elsewhere``: Handrail's figures for the other requests; None where there are none.
    ``truly``: what truly happened to these requests.
    ``fetches``: the true outcomes of their KV fetches.
    ``retried``: how many of them another prefill host had refused before.
    ``preempted``: how often they were preempted.
    """

    fault: str
    requests: int
    costs: Mapping[str, float]
    elsewhere: Mapping[str, float] | None
    truly: Mapping[str, float]
    fetches: Mapping[str, int]
    retried: int
    preempted: int


def read_truths(folder: Path, sent: Path, began_unix_ns: int) -> list[RequestTruth]:
    """Read the true course of every request of a run.

    Source: the files that the fleet's processes wrote into ``folder``, and the output of the load generator.
    """
    lines = [line for path in sorted(folder.glob("*.truth")) for line in truth_log.read(path)]
    clients: list[load.SentRequest] = truth_log.read_load(sent)
    return truth_log.truths(lines, clients, began_unix_ns)


def struck(text: str, fault: Fault, truths: Sequence[RequestTruth], rows: Sequence[RequestRow]) -> Struck:
    """Compare one fault's requests with the others.

    ``rows``: Handrail's rows of the same requests.
    """
    there = [each for each in truths if _went(each, fault.place)]
    ids = {each.request_id for each in there}
    streams = [row for row in rows if row.phase_of == "ttft"]
    others = [row for row in streams if row.client_request_id not in ids]
    return Struck(
        fault=text,
        requests=len(there),
        costs=phases_p50([row for row in streams if row.client_request_id in ids]),
        elsewhere=phases_p50(others) if others else None,
        truly=_truly([each for each in there if each.ttft_ns is not None]),
        fetches=dict(Counter(each.fetch.value for each in there)),
        retried=sum(bool(each.abandoned) for each in there),
        preempted=sum(each.preemptions for each in there),
    )


def _went(request: RequestTruth, place: str) -> bool:
    link = f"{request.prefill_host}>{request.decode_host}"
    return place in ("*", "router", link, request.prefill_host, request.decode_host, *request.abandoned)


def _truly(requests: Sequence[RequestTruth]) -> dict[str, float]:
    if not requests:
        return {}
    totals = [_named(each) for each in requests]
    names = {name for total in totals for name in total}
    medians = {name: statistics.median(total[name] for total in totals) / 1e6 for name in names}
    return {phase.value: round(medians[phase.value], 3) for phase in ORDER if phase.value in medians}


def _named(request: RequestTruth) -> Counter[str]:
    total: Counter[str] = Counter()
    for phase, ns in request.phases.items():
        total[Phase.ROUTER_AND_HOPS.value if phase in _OUTSIDE else phase.value] += ns
    return total


def render(one: Struck) -> Table:
    """Render one line a phase: the struck requests, the others, and the truth."""
    table = Table(title=f"{one.fault}: {_requests(one)}", title_justify="left", title_style="bold", box=None, padding=(0, 2))
    table.add_column("p50")
    columns = [one.costs, *([one.elsewhere] if one.elsewhere is not None else []), one.truly]
    titles = ["Handrail, there", *(["elsewhere"] if one.elsewhere is not None else []), "truly, there"]
    for title in titles:
        table.add_column(title, justify="right")
    for phase in sorted(ORDER, key=lambda each: ORDER[each]):
        if any(column.get(phase.value, 0) for column in columns):
            cells = [_shown(column.get(phase.value)) for column in columns]
            table.add_row(phase.value, *cells)
    return table


def caption(load_after_ns: int) -> str:
    """Explain how to read the tables."""
    return (
        "unattributed: vLLM's span has kv_wait to decode_queue in one number, and without the plugin nothing tells them apart.\n"
        f"The load began {format_duration(load_after_ns)} after the fleet, which is where a fault's seconds count from."
    )


def _requests(one: Struck) -> str:
    if not one.requests:
        return "no request went there"
    lines = [f"{one.requests} request{'' if one.requests == 1 else 's'} went there"]
    lines.append("their KV: " + ", ".join(f"{count} {name}" for name, count in sorted(one.fetches.items())))
    lines += [f"{one.retried} refused by a prefill host"] if one.retried else []
    lines += [f"{one.preempted} preemptions"] if one.preempted else []
    return "; ".join(lines)


def _shown(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:.1f} ms"


def plain(one: Struck) -> dict[str, Any]:
    """Convert to plain data for JSON."""
    return {
        "fault": one.fault,
        "requests": one.requests,
        "phases_p50_ms": dict(one.costs),
        "elsewhere_p50_ms": None if one.elsewhere is None else dict(one.elsewhere),
        "true_p50_ms": dict(one.truly),
        "true_fetches": dict(one.fetches),
        "true_retried": one.retried,
        "true_preemptions": one.preempted,
    }
