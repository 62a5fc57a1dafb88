"""What the sidecar says on /metrics of the host's links: the table of ``links/counters.py``, and what reading it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.families.schema import Kind
from handrail.hardware import Counter
from handrail.links.counters import COUNTERS
from handrail.links.sampler import LinkSampler, State
from handrail.links.watch import Watch
from handrail.selfmetrics import Row
from handrail.sources.links import LinkSource

_DEVICE: Final = ("device", "kind")


def link_rows(source: LinkSource) -> list[Row]:
    """Rows for ``SelfMetrics``. A device that is gone or hangs shows no values: what is not known is absent, not old."""
    sampler, prefix = source.sampler, f"{names.METRIC_SIDECAR}_links"
    return [
        *(_counter_row(sampler, counter) for counter in COUNTERS),
        Row(
            f"{names.METRIC_LINK}_peak_bytes_per_second",
            "gauge",
            "Highest rate over any second of the last minute; a mean over a scrape hides bursts",
            lambda: {
                (*_labels(watch), direction): rate
                for watch in _read(sampler)
                for direction, rate in watch.peak_bytes_per_second().items()
            },
            (*_DEVICE, "direction"),
        ),
        Row(f"{prefix}", "gauge", "Links, by the state of their reads", lambda: _states(sampler), ("state",)),
        _sum(prefix, sampler, "reads", "Readings of links", lambda watch: watch.stats.reads),
        _sum(prefix, sampler, "resets", "Link counters that restarted", lambda watch: watch.stats.resets),
        Row(
            f"{prefix}_samples_dropped",
            "counter",
            "Samples of links that were not accepted",
            lambda: float(source.dropped + sum(watch.stats.dropped for watch in list(sampler.watches.values()))),
        ),
        Row(f"{prefix}_faults", "counter", "Faults of Handrail while reading links", lambda: float(sampler.faults)),
    ]


def _counter_row(sampler: LinkSampler, counter: Counter) -> Row:
    labels = (*_DEVICE, counter.label) if counter.label else _DEVICE

    def read() -> Mapping[tuple[str, ...], float]:
        return {
            (*_labels(watch), label) if counter.label else _labels(watch): value
            for watch in _read(sampler)
            for (name, label), value in dict(watch.values).items()
            if name == counter.name
        }

    kind = "gauge" if counter.kind is Kind.GAUGE else "counter"
    return Row(f"{names.METRIC_LINK}_{counter.name}", kind, counter.help, read, labels)  # type: ignore[arg-type]


def _read(sampler: LinkSampler) -> list[Watch]:
    return [watch for watch in list(sampler.watches.values()) if sampler.state(watch) is State.READ]


def _labels(watch: Watch) -> tuple[str, str]:
    return watch.reader.key, watch.reader.source.value


def _states(sampler: LinkSampler) -> Mapping[tuple[str, ...], float]:
    states = [sampler.state(watch) for watch in list(sampler.watches.values())]
    left_out = len(sampler.chosen.left_out) if sampler.chosen is not None else 0
    return {**{(state.value,): float(states.count(state)) for state in State}, ("left_out",): float(left_out)}


def _sum(prefix: str, sampler: LinkSampler, name: str, text: str, of: Callable[[Watch], int]) -> Row:
    return Row(f"{prefix}_{name}", "counter", text, lambda: float(sum(of(watch) for watch in list(sampler.watches.values()))))
