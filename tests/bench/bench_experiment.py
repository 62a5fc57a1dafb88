"""Compare the published L40S experiment with the predictions of the scenarios.

It also predicts the H100 scenarios. All runs use virtual time and fixed seeds.
This is no benchmark of the machine: the figures are the same everywhere.
The budget is the published figure. ``met`` says whether the median over the seeds is within 10 % of it.
``python -m tests.bench.bench_experiment`` prints the tables of docs/experiment.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from handrail_sim.emulator import experiment
from handrail_sim.emulator.experiment import H100_ARMS, OBJECTIVE, POINTS, ExperimentMeasure, MeasureKind, Point

SEEDS = (1, 2, 3, 4, 5)
REQUESTS = 2000  # requests in a run
H100_REQUESTS = 1000
H100_BUDGETS = (512, 2048)  # tokens of a step (default 8192): the setting that chunked prefill tunes
PAYS_SHARE = 0.9  # share of requests that meet the objective
_H100_SPLIT = "h100-70b-split"
_SHOWN = (
    ExperimentMeasure.TTFT_P50,
    ExperimentMeasure.TTFT_P99,
    ExperimentMeasure.GAP_P50,
    ExperimentMeasure.GAP_P99,
    ExperimentMeasure.TPOT_P50,
)


def _row(name: str, values: Sequence[float], unit: str, requests: int, **more: Any) -> dict[str, Any]:
    """Return one row; ``values`` holds one value for each seed."""
    row: dict[str, Any] = {"name": name, "value": median(values), "unit": unit, "budget": None, "ratio": None, "met": None}
    return row | {"least": min(values), "most": max(values), "seeds": list(SEEDS), "requests": requests} | more


def _published() -> Iterator[dict[str, Any]]:
    runs = {
        key: [experiment.figures(experiment.run(key[0], seed, REQUESTS, key[1])) for seed in SEEDS]
        for key in dict.fromkeys((point.scenario, point.arrivals_per_s) for point in POINTS)
    }
    for point in POINTS:
        values = [figures[point.figure] for figures in runs[point.scenario, point.arrivals_per_s]]
        value = median(values)
        yield _row(
            _name(point),
            values,
            point.figure.unit,
            REQUESTS,
            budget=point.nearest(value),
            ratio=point.ratio(value),
            met=point.fits(value),
            kind=point.kind.value,
            published=[point.least, point.most],
        )


def _h100() -> Iterator[dict[str, Any]]:
    arms: list[tuple[str, str, int | None]] = [(name, name, None) for name in H100_ARMS]
    arms += [(f"h100-70b-chunked/{budget}", "h100-70b-chunked", budget) for budget in H100_BUDGETS]
    for arm, scenario, budget in arms:
        runs = [experiment.run(scenario, seed, H100_REQUESTS, None, budget) for seed in SEEDS]
        read = [experiment.figures(truths) for truths in runs]
        for figure in _SHOWN:
            yield _row(f"{arm}: {figure.value}", [figures[figure] for figures in read], figure.unit, H100_REQUESTS, arm=arm)
        met = [experiment.share_met(OBJECTIVE, truths) for truths in runs]
        pays = {"budget": PAYS_SHARE, "ratio": median(met) / PAYS_SHARE, "met": median(met) >= PAYS_SHARE}
        yield _row(f"{arm}: objective met", met, "share", H100_REQUESTS, arm=arm, **(pays if scenario == _H100_SPLIT else {}))
        if scenario == _H100_SPLIT:
            yield _transfer([figures[ExperimentMeasure.TRANSFER_LEAST] for figures in read])


def _transfer(values: Sequence[float]) -> dict[str, Any]:
    ratio = median(values) / experiment.H100_TRANSFER_MS
    met = abs(ratio - 1) <= experiment.TOLERANCE
    return _row(
        f"{_H100_SPLIT}: KV transfer", values, "ms", H100_REQUESTS, budget=experiment.H100_TRANSFER_MS, ratio=ratio, met=met
    )


def _name(point: Point) -> str:
    return f"{point.name} ({point.kind.value})"


def run() -> list[dict[str, Any]]:
    """Return every row. Takes a minute or two of computing."""
    return [*_published(), *_h100()]


def published_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the published points beside the scenarios' figures, as Markdown."""
    lines = ["| | published | scenario | over the seeds | ratio | within 10 % |", "|---|---|---|---|---|---|"]
    for kind, title in ((MeasureKind.INPUT, "inputs"), (MeasureKind.PREDICTION, "predictions")):
        lines.append(f"| **{title}** | | | | | |")
        for point in (each for each in POINTS if each.kind is kind):
            row = next(each for each in rows if each["name"] == _name(point))
            published = f"{point.least:g}" if point.least == point.most else f"{point.least:g}–{point.most:g}"
            fits = "yes" if row["met"] else "**no**"
            over = f"{_number(row['least'])} to {_number(row['most'])}"
            lines.append(
                f"| {point.name} | {published} {row['unit']} | {_number(row['value'])} | {over} | {row['ratio']:.2f} | {fits} |"
            )
    return "\n".join(lines)


def h100_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the H100 table in Markdown, one line for each arm."""
    lines = ["| | TTFT p50 / p99 | ITL p50 / p99 | TPOT p50 | objective met |", "|---|---|---|---|---|"]
    for arm in dict.fromkeys(row["arm"] for row in rows if "arm" in row):
        ttft, ttft_p99, gap, gap_p99, tpot, met = (row["value"] for row in rows if row.get("arm") == arm)
        lines.append(
            f"| {arm} | {_number(ttft)} / {_number(ttft_p99)} ms | {_number(gap)} / {_number(gap_p99)} ms "
            f"| {_number(tpot)} ms | {100 * met:.1f} % |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    """Format a number with three or four significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    figures = run()
    print(published_table(figures), h100_table(figures), sep="\n\n")
