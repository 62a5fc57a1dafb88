"""The answer of ``handrail doctor``: for a person, failures with their reasons; as JSON, everything."""

from __future__ import annotations

from typing import Any, Final

from handrail.cli.amounts import format_bytes
from handrail.cli.shown import print_document
from handrail.doctor.checks import counts, nothing_was_judged
from handrail.doctor.facts import Facts
from handrail.doctor.pair import Placement
from handrail.doctor.predict import Rate
from handrail.doctor.verdict import Finding, Verdict
from handrail.doctor.worth import Answer, Reason, Side, Worth, per_thousand_ns
from handrail.times import format_duration

_PIPE_WIDTH: Final = 160
_STYLES: Final = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red", Verdict.SKIP: "dim"}
_MARKS: Final = {Side.SPLIT: "+", Side.STAY: "−", Side.OPEN: "?"}
_PLACEMENTS: Final = {
    Placement.SAME_HOST: "Prefill and decode on one host",
    Placement.ACROSS_HOSTS: "Prefill and decode on different hosts",
    Placement.UNKNOWN: "Where prefill and decode stand to each other is not known",
}
_WORTHS: Final = {
    Worth.LIKELY: "Splitting is likely to pay here.",
    Worth.UNLIKELY: "Stay collocated.",
    Worth.OPEN: "Whether splitting pays here cannot be told yet.",
}

NOTHING_JUDGED: Final = (
    "Nothing was checked. Give --prefill URL and --decode URL of running engines, --config FILE with what starts them, or, on an "
    "engine's host, --on; --model MODEL_CONFIG alone gives the prediction."
)


def print_page(facts: Facts, found: dict[str, list[Finding]], rate: Rate | None, answer: Answer) -> None:
    """Every check in its group, one line; why and what to do below those that warn or fail; then the prediction."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from handrail.cli.terminal import answer_console

    console = answer_console(in_pipe=_PIPE_WIDTH)
    console.print(f"{_PLACEMENTS[facts.placement]}: {facts.placement_by}")
    console.print()
    widest = max((len(finding.title) for group in found.values() for finding in group), default=0)
    for group, listed in found.items():
        if not listed:
            continue
        console.print(Text(group, style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, collapse_padding=True)
        table.add_column(width=4, no_wrap=True)
        table.add_column(width=min(widest, max(20, console.width // 3)))
        table.add_column()
        for finding in listed:
            style = _STYLES[finding.verdict]
            seen = Text(finding.seen, style="dim" if finding.verdict is Verdict.SKIP else "")
            told: list[Any] = [seen.append(f"  [{finding.check}]", style="dim")]
            if finding.verdict in (Verdict.WARN, Verdict.FAIL):
                told += [Text.assemble(("why  ", "bold"), finding.why), Text.assemble(("do   ", "bold"), finding.do)]
            elif finding.do and finding.verdict is Verdict.SKIP:
                told.append(Text(f"to see it: {finding.do}", style="dim"))
            table.add_row(Text(finding.verdict.value, style=style), Text(finding.title), Group(*told))
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for line in _prediction(facts, rate):
        console.print(line)
    console.print()
    console.print(Text(_WORTHS[answer.worth], style="bold"))
    for reason in answer.reasons:
        console.print(Text(f"  {_MARKS[reason.side]} {reason.criterion}: {reason.seen}"))
    console.print()
    number = counts(found)
    shown = ", ".join(
        f"{number[verdict]} {verdict.value}" for verdict in (Verdict.FAIL, Verdict.WARN, Verdict.PASS, Verdict.SKIP)
    )
    console.print(Text(shown, style=_STYLES[Verdict.FAIL] if number[Verdict.FAIL] else "bold"))
    if nothing_was_judged(facts, found):
        console.print(Text(NOTHING_JUDGED, style="bold"))


def _prediction(facts: Facts, rate: Rate | None) -> list[str]:
    if facts.sizes is None:
        return [f"The hand-off cannot be predicted: {facts.no_sizes}."]
    sizes, tokens = facts.sizes, facts.asked.tokens
    request = sizes.request(tokens)
    lines = [
        f"{sizes.shape.architecture}: {sizes.moved_token_bytes:,} bytes a token; "
        f"{tokens:,} tokens hand over {format_bytes(request.bytes)}"
    ]
    if rate is None:
        return [
            *lines,
            "How fast the link is, is not known: --link-gbps, or doctor with --on and --placement on an engine's host.",
        ]
    took = request.transfer_ns(rate.bytes_per_s)
    lines.append(
        f"at {rate.bytes_per_s / 1e9:.3g} GB/s ({rate.source.value}): "
        f"{format_duration(per_thousand_ns(sizes, rate))} for each 1,000 tokens, "
        f"{format_duration(took)} for {tokens:,}"
    )
    if rate.best_bytes_per_s:
        best = request.transfer_ns(rate.best_bytes_per_s)
        lines.append(f"at best {rate.best_bytes_per_s / 1e9:.3g} GB/s: {format_duration(best)}")
    lines.append(f"the rate: {rate.why}")
    lines += [f"assumed: {note}" for note in sizes.shape.assumed]
    return lines


# --- JSON -----------------------------------------------------------------------------------------------------------------


def print_json(facts: Facts, found: dict[str, list[Finding]], rate: Rate | None, answer: Answer) -> None:
    """One object: ``checks``, ``counts``, ``prediction`` (bytes, ns), ``splitting``."""
    number = counts(found)
    whole = {
        "placement": facts.placement.value,
        "placement_by": facts.placement_by,
        "checks": [_finding(group, finding) for group, listed in found.items() for finding in listed],
        "counts": {verdict.value: number[verdict] for verdict in Verdict},
        "prediction": _prediction_json(facts, rate),
        "splitting": {"answer": answer.worth.value, "reasons": [_reason(reason) for reason in answer.reasons]},
    }
    print_document(whole)


def _finding(group: str, finding: Finding) -> dict[str, str]:
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
    sizes, tokens = facts.sizes, facts.asked.tokens
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


def _reason(reason: Reason) -> dict[str, str]:
    return {"criterion": reason.criterion, "speaks": reason.side.value, "seen": reason.seen}
