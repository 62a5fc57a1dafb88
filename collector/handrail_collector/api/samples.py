"""Answer ``GET /api/v1/samples``: GPU and link samples of a period.

The samples are grouped by device and counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from handrail.device_counters.gpu import ALL as GPU_COUNTERS
from handrail.device_counters.link import BY_NAME as LINK_COUNTERS
from handrail.durations import DURATION_RULE, parse_duration_ns
from handrail.records.devices import DeviceRun, DeviceSample, runs
from handrail_collector.api.errors import ApiError, nearest
from handrail_collector.api.query import PARAMETERS, WHERE, Reading, fields_of, one_of, text_of
from handrail_collector.store.contract import StoreQueries
from handrail_collector.store.filters import SampleFilter
from handrail_collector.store.schema import Table

DEFAULT_NS: Final = 300_000_000_000
MOST_POINTS: Final = 600
"""Most points of one series.

Over a longer period, each point is the mean, or the last value, of a part of it.
"""

_KINDS: Final = {"gpu": Table.GPU_SAMPLES, "link": Table.LINK_SAMPLES}

NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu": tuple(sorted({counter.name for counter in GPU_COUNTERS})),
    "link": tuple(sorted(LINK_COUNTERS)),
}
"""Counters that this release knows, by kind; a newer sidecar may send more."""

SAMPLE_PARAMETERS: Final[dict[str, Reading]] = {
    **{name: PARAMETERS[name] for name in ("since", "until", "since_unix_ns", "until_unix_ns")},
    "kind": ("kind", one_of(tuple(_KINDS)), ", ".join(_KINDS), tuple(_KINDS)),
    "host": ("host", text_of, "a host's name or id", ()),
    "name": ("name", text_of, "a counter's name, such as utilization_ratio", ()),
    "every": ("every_ns", lambda text, _: parse_duration_ns(text), DURATION_RULE, ()),
}
"""Every parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuestion:
    """Parameters of a question about samples; ``kind``: ``gpu`` or ``link``."""

    kind: str
    wanted: SampleFilter


def parse_samples(pairs: Iterable[tuple[str, str]], now_unix_ns: int) -> SampleQuestion:
    """Parse the parameters.

    Without ``since``, the period is the last five minutes. Raises ``ApiError`` (400) for the first parameter that is wrong.
    """
    given = fields_of(pairs, SAMPLE_PARAMETERS, now_unix_ns)
    if "kind" not in given:
        raise ApiError(status=400, what="kind: missing", where=WHERE, valid=", ".join(_KINDS))
    until = given.get("until_unix_ns", now_unix_ns)
    since = given.get("since_unix_ns", until - DEFAULT_NS)
    if since >= until:
        raise ApiError(status=400, what="since: must be before until", where=WHERE, valid="values that fit each other")
    long = until - since > MOST_POINTS * 100_000_000
    least = -(-(until - since) // MOST_POINTS) if long else 0
    wanted = SampleFilter(
        since_unix_ns=since,
        until_unix_ns=until,
        hosts=frozenset({given["host"]}) if "host" in given else None,
        names=frozenset({given["name"]}) if "name" in given else None,
        every_ns=max(least, given.get("every_ns", 0)),
    )
    return SampleQuestion(kind=given["kind"], wanted=wanted)


def _refuse_unknown(question: SampleQuestion) -> None:
    valid = NAMES[question.kind]
    for name in sorted((question.wanted.names or frozenset()) - set(valid)):
        others = ", ".join(kind for kind, names in NAMES.items() if name in names)
        what = (
            f"name: {name!r} is a counter of kind {others}" if others else f"name: there is no {question.kind} counter {name!r}"
        )
        raise ApiError(status=400, what=what, where=WHERE, valid=", ".join(valid), nearest=nearest(name, valid))


def _order(run: DeviceRun) -> tuple[Any, ...]:
    return run.process.host_name, run.process.instance, run.device.kind, run.device.index or 0, run.device.key, run.at_unix_ns


def samples_answer(reader: StoreQueries, question: SampleQuestion) -> dict[str, Any]:
    """Answer as JSON.

    ``every_ns``: how long each part is; 0: every sample.
    Raises ``ApiError`` (400) for a counter that is neither known nor found, and ``StoreDamagedError``.
    """
    wanted = question.wanted
    samples: list[DeviceSample] = reader.samples(_KINDS[question.kind], wanted)
    if not any(sample.values for sample in samples):
        _refuse_unknown(question)
    devices = [
        {
            "host": run.process.host_name or run.process.host,
            "instance": run.process.instance,
            "role": run.process.role.value,
            "source": run.source.value,
            **asdict(run.device),
            "kind": run.device.kind.value,
            "at_unix_ns": run.at,
            "series": [
                {"name": one.name, "label": one.label, "counting_since_unix_ns": one.start_unix_ns or None, "values": one.values}
                for one in sorted(run.series, key=lambda one: (one.name, one.label))
            ],
        }
        for run in sorted(runs(samples), key=_order)
    ]
    return {
        "since_unix_ns": wanted.since_unix_ns,
        "until_unix_ns": wanted.until_unix_ns,
        "every_ns": wanted.every_ns,
        "devices": devices,
    }
