"""Define the metrics of the host's links, and what reading them costs.

The counters are those of the table in ``device_counters/link.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from handrail import conventions as names
from handrail.device_counters.link import COUNTERS
from handrail.metrics.registry import MetricDef
from handrail.records.devices import CounterDef
from handrail.records.quantities import QuantityKind
from handrail_sidecar.links.device_state import DeviceState
from handrail_sidecar.links.sampler import LinkSampler, ReadState
from handrail_sidecar.sources.links import LinkSource

_DEVICE: Final = ("device", "kind")


def link_rows(source: LinkSource) -> list[MetricDef]:
    """Return the link metrics for ``Registry``.

    A device that is gone or hangs shows no values: an unknown value is absent, an old one is never shown.
    """
    sampler, prefix = source.sampler, f"{names.METRIC_SIDECAR}_links"
    return [
        *(_counter_row(sampler, counter) for counter in COUNTERS),
        MetricDef(
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
        MetricDef(f"{prefix}", "gauge", "Links, by the state of their reads", lambda: _states(sampler), ("state",)),
        _sum(prefix, sampler, "reads", "Readings of links", lambda watch: watch.stats.reads),
        _sum(prefix, sampler, "resets", "Link counters that restarted", lambda watch: watch.stats.resets),
        MetricDef(
            f"{prefix}_samples_dropped",
            "counter",
            "Samples of links that were not accepted",
            lambda: float(source.dropped + sum(watch.stats.dropped for watch in list(sampler.watches.values()))),
        ),
        MetricDef(f"{prefix}_faults", "counter", "Faults of Handrail while reading links", lambda: float(sampler.faults)),
    ]


def _counter_row(sampler: LinkSampler, counter: CounterDef) -> MetricDef:
    labels = (*_DEVICE, counter.label) if counter.label else _DEVICE

    def read() -> Mapping[tuple[str, ...], float]:
        return {
            (*_labels(watch), label) if counter.label else _labels(watch): value
            for watch in _read(sampler)
            for (name, label), value in dict(watch.values).items()
            if name == counter.name
        }

    kind = "gauge" if counter.kind is QuantityKind.GAUGE else "counter"
    return MetricDef(f"{names.METRIC_LINK}_{counter.name}", kind, counter.help, read, labels)  # type: ignore[arg-type]


def _read(sampler: LinkSampler) -> list[DeviceState]:
    return [watch for watch in list(sampler.watches.values()) if sampler.state(watch) is ReadState.READ]


def _labels(watch: DeviceState) -> tuple[str, str]:
    return watch.reader.key, watch.reader.source.value


def _states(sampler: LinkSampler) -> Mapping[tuple[str, ...], float]:
    states = [sampler.state(watch) for watch in list(sampler.watches.values())]
    left_out = len(sampler.chosen.left_out) if sampler.chosen is not None else 0
    return {**{(state.value,): float(states.count(state)) for state in ReadState}, ("left_out",): float(left_out)}


def _sum(prefix: str, sampler: LinkSampler, name: str, text: str, of: Callable[[DeviceState], int]) -> MetricDef:
    return MetricDef(
        f"{prefix}_{name}", "counter", text, lambda: float(sum(of(watch) for watch in list(sampler.watches.values())))
    )
