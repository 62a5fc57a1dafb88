"""Render the answer of ``handrail doctor``.

For a person it shows failures with their reasons; as JSON, everything.
"""

from __future__ import annotations

from typing import Any, Final

from handrail.durations import format_duration
from handrail_cli.formatting import format_bytes
from handrail_cli.sanitize import print_document
from handrail_doctor.checks.all_checks import counts, nothing_was_judged, own_counts
from handrail_doctor.checks.result import CheckResult, CheckStatus
from handrail_doctor.facts import Facts, Placement
from handrail_doctor.prediction import Rate
from handrail_doctor.split_worth import Criterion, CriterionSide, SplitAdvice, Worth, per_thousand_ns

_PIPE_WIDTH: Final = 160
_STYLES: Final = {CheckStatus.PASS: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red", CheckStatus.SKIP: "dim"}
_MARKS: Final = {CriterionSide.SPLIT: "+", CriterionSide.STAY: "−", CriterionSide.OPEN: "?"}
_PLACEMENTS: Final = {
    Placement.SAME_HOST: "Prefill and decode on one host",
    Placement.ACROSS_HOSTS: "Prefill and decode on different hosts",
    Placement.UNKNOWN: "It is unknown whether prefill and decode share a host",
}
_WORTHS: Final = {
    Worth.LIKELY: "Splitting is likely to pay here.",
    Worth.UNLIKELY: "Stay collocated.",
    Worth.OPEN: "Cannot tell yet whether splitting pays here.",
}

NOTHING_JUDGED: Final = (
    "Nothing was checked. Give --prefill URL and --decode URL of running engines, --config FILE with what starts them, or, on an "
    "engine's host, --on; --model MODEL_CONFIG alone gives the prediction."
)


def print_page(facts: Facts, found: dict[str, list[CheckResult]], rate: Rate | None, answer: SplitAdvice) -> None:
    """Print the checks, then the prediction.

    Every check has one line in its group. The reason and the remedy follow a check that warns or fails.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from handrail_cli.console import answer_console
    from handrail_cli.tables import grid

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(f"{_PLACEMENTS[facts.placement]}: {facts.placement_by}")
    console.print()
    widest = max((len(finding.title) for group in found.values() for finding in group), default=0)
    for group, listed in found.items():
        if not listed:
            continue
        console.print(Text(group, style="bold"))
        table = grid(header=False)
        table.add_column(width=4, no_wrap=True)
        table.add_column(width=min(widest, max(20, console.width // 3)))
        table.add_column()
        for finding in listed:
            style = _STYLES[finding.verdict]
            seen = Text(finding.seen, style="dim" if finding.verdict is CheckStatus.SKIP else "")
            reports: list[Any] = [seen.append(f"  [{finding.check}]", style="dim")]
            if finding.verdict in (CheckStatus.WARN, CheckStatus.FAIL):
                reports += [Text.assemble(("why  ", "bold"), finding.why), Text.assemble(("do   ", "bold"), finding.do)]
            elif finding.do and finding.verdict is CheckStatus.SKIP:
                reports.append(Text(f"to see it: {finding.do}", style="dim"))
            table.add_row(Text(finding.verdict.value, style=style), Text(finding.title), Group(*reports))
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for line in _prediction(facts, rate):
        console.print(line)
    console.print()
    console.print(Text(_WORTHS[answer.worth], style="bold"))
    for reason in answer.reasons:
        console.print(Text(f"  {_MARKS[reason.side]} {reason.criterion}: {reason.seen}"))
    console.print()
    number, own = counts(found), own_counts(found)
    console.print(Text(_counted(number), style=_STYLES[CheckStatus.FAIL] if number[CheckStatus.FAIL] else "bold"))
    if any(own.values()):
        console.print(Text(f"{_counted(own)}: what Handrail itself needs", style="bold"))
    if nothing_was_judged(facts, found):
        console.print(Text(NOTHING_JUDGED, style="bold"))


def _counted(number: dict[CheckStatus, int]) -> str:
    order = (CheckStatus.FAIL, CheckStatus.WARN, CheckStatus.PASS, CheckStatus.SKIP)
    return ", ".join(f"{number[verdict]} {verdict.value}" for verdict in order)


def _prediction(facts: Facts, rate: Rate | None) -> list[str]:
    if facts.sizes is None:
        return [f"The hand-off cannot be predicted: {facts.no_sizes}."]
    sizes, tokens = facts.sizes, facts.options.tokens
    request = sizes.request(tokens)
    lines = [
        f"{sizes.shape.architecture}: {sizes.moved_token_bytes:,} bytes per token; "
        f"{tokens:,} tokens hand over {format_bytes(request.bytes)}"
    ]
    if rate is None:
        return [
            *lines,
            "The rate of the link is unknown: give --link-gbps, or run doctor with --on and --placement on an engine's host.",
        ]
    took = request.transfer_ns(rate.bytes_per_s)
    lines.append(
        f"at {rate.bytes_per_s / 1e9:.3g} GB/s ({rate.source.value}): "
        f"{format_duration(per_thousand_ns(sizes, rate))} for each 1,000 tokens, "
        f"{format_duration(took)} for {tokens:,}"
    )
    if rate.best_bytes_per_s:
        best = request.transfer_ns(rate.best_bytes_per_s)
        lines.append(f"at best, {rate.best_bytes_per_s / 1e9:.3g} GB/s: {format_duration(best)}")
    lines.append(f"the rate: {rate.why}")
    lines += [f"assumed: {note}" for note in sizes.shape.assumed]
    return lines


# --- JSON -----------------------------------------------------------------------------------------------------------------


def print_json(facts: Facts, found: dict[str, list[CheckResult]], rate: Rate | None, answer: SplitAdvice) -> None:
    """Print one object: ``checks``, ``counts``, ``own_counts``, ``prediction``, ``splitting``.

    The prediction is in bytes and ns.
    """
    number, own = counts(found), own_counts(found)
    whole = {
        "placement": facts.placement.value,
        "placement_by": facts.placement_by,
        "checks": [_finding(group, finding) for group, listed in found.items() for finding in listed],
        "counts": {verdict.value: number[verdict] for verdict in CheckStatus},
        "own_counts": {verdict.value: own[verdict] for verdict in CheckStatus},
        "prediction": _prediction_json(facts, rate),
        "splitting": {"answer": answer.worth.value, "reasons": [_reason(reason) for reason in answer.reasons]},
    }
    print_document(whole)


def _finding(group: str, finding: CheckResult) -> dict[str, str]:
    return {
        "check": finding.check,
        "group": group,
        "title": finding.title,
        "verdict": finding.verdict.value,
        "seen": finding.seen,
        "why": finding.why,
        "do": finding.do,
    }


def _prediction_json(facts: Facts, rate: Rate | None) -> dict[str, Any]:
    sizes, tokens = facts.sizes, facts.options.tokens
    if sizes is None:
        return {"missing": facts.no_sizes}
    request = sizes.request(tokens)
    found: dict[str, Any] = {
        "architecture": sizes.shape.architecture,
        "token_bytes": sizes.moved_token_bytes,
        "tokens": tokens,
        "bytes": request.bytes,
        "assumed": list(sizes.shape.assumed),
        "rate": None,
    }
    if rate is not None:
        best = rate.best_bytes_per_s
        found["rate"] = {
            "bytes_per_s": rate.bytes_per_s,
            "source": rate.source.value,
            "why": rate.why,
            "best_bytes_per_s": best,
        }
        found["thousand_tokens_ns"] = per_thousand_ns(sizes, rate)
        found["transfer_ns"] = request.transfer_ns(rate.bytes_per_s)
        found["best_transfer_ns"] = request.transfer_ns(best) if best else None
    return found


def _reason(reason: Criterion) -> dict[str, str]:
    return {"criterion": reason.criterion, "speaks": reason.side.value, "seen": reason.seen}
