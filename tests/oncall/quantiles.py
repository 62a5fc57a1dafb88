"""Compare the quantiles of the boards with the raw values of the load.

Each must be within a tenth, from 1 ms to 100 s.
The middle range comes from a real fleet: its raw values are the client's measurements.
The extremes would take a day of waiting, so values go directly to a sidecar's own counters and are read from its page.
A window begins and ends with a scrape while nothing happens, so both sides cover the same requests.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from handrail.metrics.registry import Registry
from handrail.runtime.admin_http import AdminServer
from handrail_cli.subprocesses import HOST
from handrail_dashboards.export import Choices, dashboards
from handrail_sidecar.catalogue import everything
from handrail_sidecar.components import make_sidecar
from harness.real_fleet import Fleet, Load, Shape, finish
from oncall.alarm import Alarm

WITHIN: Final = 0.1
SHARES: Final = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
_PANELS: Final = {"ttft": "Time to first token by pool", "gap": "Stream gaps by pool"}
_BANDS_S: Final = ((0.001, 0.01), (0.01, 0.1), (0.1, 1.0), (1.0, 10.0), (10.0, 100.0))
_VALUES: Final = 20_000
_SECOND: Final = 10**9
_WARM: Final = Load(rate=3.0, requests=30)
_MAIN: Final = Load(rate=4.0, requests=1200, answer_tokens=(8, 16))
_FAULTS: Final = (
    "router_slow:router:0.3",
    *(f"router_slow:router:1@{at}-{at + 6}" for at in range(0, 1200, 20)),
    *(f"router_slow:router:2.5@{at}-{at + 4}" for at in range(13, 1200, 61)),
    "host_pause:d0:0.6",
)
"""First tokens after 0.4 to 4 s, and gaps of 0.1 to 0.7 s."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One quantile, in seconds.

    ``of``: "fleet" or the band of values. ``what``: ttft or gap. ``count``: how many raw values.
    """

    of: str
    what: str
    share: str
    raw_s: float
    shown_s: float
    count: int

    @property
    def error(self) -> float:
        """Return the error as a share of the raw value."""
        return abs(self.shown_s / self.raw_s - 1)


def exact(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not below this share of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def query(what: str, share: str, cluster: str, model: str, role: str, window_s: float) -> str:
    """Return the board's own query of a quantile, with its variables set."""
    boards = json.loads(dashboards(Choices())["fleet.json"])["panels"]
    (panel,) = (each for each in boards if each["title"] == _PANELS[what])
    place = [word for _, word in SHARES].index(share)
    text: str = panel["targets"][place]["expr"]
    if f"histogram_quantile({SHARES[place][0]:g}," not in text:
        raise ValueError(f"{_PANELS[what]}: its query {place + 1} is not of {share}: {text}")
    chosen = {"cluster": cluster, "model": model, "role": role, "instance": ".*"}
    for name, value in chosen.items():
        text = text.replace(f"${name}", value)
    return text.replace("$__rate_interval", f"{round(window_s * 1000)}ms")


def measure(alarm: Alarm, folder: Path, interval_s: float, say: Callable[[str], None]) -> list[Reading]:
    """Return all readings; takes some ten minutes."""
    say("quantiles: values from 1 ms to 100 s through a sidecar's page")
    found = _extremes(alarm, interval_s)
    say("quantiles: a fleet's own, by its clients")
    return [*found, *_of_a_fleet(alarm, folder, interval_s, say)]


def _extremes(alarm: Alarm, interval_s: float) -> list[Reading]:
    draw = random.Random(11)
    made, role = make_sidecar(everything()), everything().role.value
    models = {f"{low:g} to {high:g} s": (low, high) for low, high in _BANDS_S}
    raw = {
        name: [round(low * (high / low) ** draw.random() * _SECOND) for _ in range(_VALUES)]
        for name, (low, high) in models.items()
    }
    for model, values in raw.items():  # one each before the window: a series must exist before it can grow
        made.live.first_token(model, values[0], "")
        made.live.gaps_of(model).extend(values[:1])
    with _page(Registry(made.metrics)) as address:
        alarm.watch("synthetic", [address], address)
        _wait(lambda: len(_scrapes(alarm, "synthetic", role)) >= 2, interval_s)
        since = _scrapes(alarm, "synthetic", role)[-1]
        for model, values in raw.items():
            for value in values:
                made.live.first_token(model, value, "")
            made.live.gaps_of(model).extend(values)
        _wait(lambda: _scrapes(alarm, "synthetic", role)[-1] > since + 1.5 * interval_s, interval_s)
        until = _scrapes(alarm, "synthetic", role)[-1]
        alarm.forget("synthetic")
    return [
        reading
        for model, values in raw.items()
        for what in _PANELS
        for reading in _read(alarm, model, what, [ns / _SECOND for ns in values], "synthetic", model, role, since, until)
    ]


def _of_a_fleet(alarm: Alarm, folder: Path, interval_s: float, say: Callable[[str], None]) -> list[Reading]:
    scenario = str(Path(__file__).with_name("medium.yaml"))
    fleet = Fleet("quantiles", folder / "quantiles", Shape(scenario=scenario, faults=_FAULTS, load=_WARM), seed=3)
    try:
        finish(fleet.starting(), 300)
        alarm.watch(fleet.name, list(fleet.sidecar_pages.values()), fleet.collector_api)
        fleet["load"].join(120)
        since = _next_scrape(alarm, fleet.name, interval_s)
        log = fleet["load"].log
        before = log.stat().st_size
        say(f"quantiles: {_MAIN.requests} requests, {_MAIN.rate:g} a second")
        fleet.start_load(_MAIN).join(_MAIN.requests / (_MAIN.rate or 1.0) + 120)
        until = _next_scrape(alarm, fleet.name, interval_s)
        sent = [json.loads(line) for line in log.read_text(encoding="utf-8")[before:].splitlines() if line.startswith("{")]
        raw = {
            "ttft": [one["ttft_token_ns"] / _SECOND for one in sent if one["ttft_token_ns"] is not None],
            "gap": [
                (later - before_it) / _SECOND
                for one in sent
                for before_it, later in zip(one["text_ns"], one["text_ns"][1:], strict=False)
            ],
        }
        return [
            reading
            for what, values in raw.items()
            for reading in _read(alarm, "fleet", what, values, fleet.name, ".*", "edge", since, until)
        ]
    finally:
        alarm.forget(fleet.name)
        fleet.end(5.0)


def _read(
    alarm: Alarm, of: str, what: str, values: Sequence[float], cluster: str, model: str, role: str, since: float, until: float
) -> Iterator[Reading]:
    for share, word in SHARES:
        found = alarm.ask(query(what, word, cluster, _literal(model), role, until - since), until)
        shown = {each["metric"].get("scope", role): float(each["value"][1]) for each in found}
        if role not in shown:
            raise ValueError(f"{of}: the board's {word} of {what} shows nothing for {role}: {found}")
        yield Reading(of, what, word, exact(values, share), shown[role], len(values))


def _literal(model: str) -> str:
    return model.replace(".", "[.]") if model != ".*" else model


def _scrapes(alarm: Alarm, cluster: str, role: str) -> list[float]:
    """Return when Prometheus scraped the sidecar of this role, oldest first.

    Times are unix seconds.
    """
    found = alarm.ask(f'handrail_ttft_seconds_count{{cluster="{cluster}", scope="{role}"}}[1h]')
    return [float(at) for at, _ in found[0]["values"]] if found else []


def _next_scrape(alarm: Alarm, cluster: str, interval_s: float) -> float:
    """Wait for the second scrape from now, which includes all that has ended."""
    now = time.time()
    _wait(lambda: len([at for at in _scrapes(alarm, cluster, "edge") if at > now]) >= 2, interval_s)
    return _scrapes(alarm, cluster, "edge")[-1]


def _wait(holds: Callable[[], bool], interval_s: float) -> None:
    until_s = time.monotonic() + 20 * interval_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError("Prometheus has not scraped it")
        time.sleep(interval_s / 10)


@contextmanager
def _page(metrics: Registry) -> Iterator[str]:
    """Serve a sidecar's admin page in a thread of its own; yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="page")
    thread.start()

    def do(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(30)

    admin = AdminServer(HOST, 0, metrics, lambda: "")
    do(admin.start())
    try:
        yield f"{HOST}:{admin.address[1]}"
    finally:
        do(admin.shutdown())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def mean_error(readings: Sequence[Reading]) -> float:
    return sum(each.error for each in readings) / len(readings)


def wrong(readings: Sequence[Reading]) -> list[str]:
    """Return the readings that are not within a tenth."""
    return [f"{each.of}: {each.share} of {each.what} {each.error:.1%} off" for each in readings if each.error > WITHIN]
