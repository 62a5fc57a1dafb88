"""Format the figures of a comparison, each with its interval.

The figures are durations, shares, rates and differences.
"""

from __future__ import annotations

from handrail.durations import format_duration, format_rfc3339
from handrail_collector.compare.report import Change, Estimate, Goodput


def changed(change: Change, gap_unit: str | None = None) -> str:
    """Format ``stream gap p99 263 ms -> 38.0 ms, -225 ms (-240 ms to -210 ms)``."""
    if change.figure == "failed_share":
        shares = (portion(Estimate(each, None, None)) for each in (change.of, change.to))
        return f"failed {' -> '.join(shares)}, {points(change.difference)}"
    of, to = (format_duration(round(each)) if each is not None else "unknown" for each in (change.of, change.to))
    return f"{label(change.figure, gap_unit)} {of} -> {to}, {signed(change.difference)}"


def label(figure: str, gap_unit: str | None) -> str:
    """Return the figure's name for people.

    Gaps are inter-token latencies only where the tokens of each chunk are known.
    """
    gap = "ITL" if gap_unit == "token" else "stream gap"
    return {
        "ttft_p50_ns": "TTFT p50",
        "ttft_p90_ns": "TTFT p90",
        "ttft_p99_ns": "TTFT p99",
        "gap_p50_ns": f"{gap} p50",
        "gap_p99_ns": f"{gap} p99",
        "per_token_ns": "time per output token",
        "failed_share": "failed",
    }[figure]


def signed(difference: Estimate) -> str:
    """Format ``+1.40 s (+1.30 s to +1.52 s)``."""
    if difference.value is None:
        return "an unknown difference"
    if difference.low is None or difference.high is None:
        return f"{_sign(difference.value)} (no interval: too few requests)"
    return f"{_sign(difference.value)} ({_sign(difference.low)} to {_sign(difference.high)})"


def _sign(duration_ns: float) -> str:
    return f"{'+' if duration_ns > 0 else ''}{format_duration(round(duration_ns))}"


def portion(share: Estimate) -> str:
    """Format ``38 % (33 to 44)``."""
    if share.value is None:
        return "unknown"
    if share.low is None or share.high is None:
        return f"{_percent(share.value)} %"
    return f"{_percent(share.value)} % ({_percent(share.low)} to {_percent(share.high)})"


def points(difference: Estimate) -> str:
    """Format a share's difference in hundredths: ``+1.2 points (+0.4 to +2.1)``."""
    if difference.value is None or difference.low is None or difference.high is None:
        return "an unknown difference"
    value, low, high = (f"{100 * each:+.2g}" for each in (difference.value, difference.low, difference.high))
    return f"{value} points ({low} to {high})"


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f}" if percent in (0, 100) or 10 <= percent <= 99 else f"{percent:.1f}"


def period(since_unix_ns: int, until_unix_ns: int) -> str:
    """Format ``2026-11-29T14:00:00Z..2026-11-29T14:30:00Z``.

    People read it, and may type it again as a period.
    """
    return "..".join(_moment(each) for each in (since_unix_ns, until_unix_ns))


def _moment(unix_ns: int) -> str:
    return f"{format_rfc3339(unix_ns)[:-1].rstrip('0').rstrip('.')}Z"


def rate(per_second: float) -> str:
    """Format ``0.40/s``."""
    return f"{per_second:.3g}/s"


def bounds(goodput: Goodput) -> str:
    """Format ``at least 0.4/s and below 1/s``, per GPU.

    An estimate follows where there is one.
    """
    parts = [
        f"{word} {rate(each / goodput.gpus)}"
        for word, each in (("at least", goodput.at_least), ("below", goodput.below))
        if each is not None
    ]
    about = f", about {rate(goodput.estimate / goodput.gpus)}" if goodput.estimate is not None else ""
    return f"{' and '.join(parts) or 'not bounded by these rates'}{about}"
