"""Define the injected faults and the alert that each must cause at the pager.

Each fault has a fleet of its own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness.real_fleet import Fleet, Load, Shape
from nvml.scenario import GPU_IS_LOST, Scenario, h100
from oncall.mixing_router import FAULT_AT_S
from oncall.relay import Relay

HERE: Final = Path(__file__).parent
SMALL, SMALL_TWO = str(HERE / "small.yaml"), str(HERE / "small-two.yaml")
_STOPPED_S: Final = 45.0
_AT: Final = f"@{FAULT_AT_S:g}"
_LONG_STREAM: Final = Load(rate=None, requests=1, answer_tokens=(15_000, 15_000), timeout_s=1200)
"""Ten minutes at a token every 40 ms."""


class Run:
    """What a case does to its fleet, beside the faults set in its processes."""

    def begin(self, fleet: Fleet) -> None:
        """Start the fault, at ``FAULT_AT_S`` of the run."""

    def go_on(self, fleet: Fleet, since_s: float) -> None:
        """Continue; called repeatedly. ``since_s``: seconds since ``begin``."""

    def end(self) -> None:
        """Stop, when the fleet ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case whose ``alert`` with these ``labels`` must reach the pager.

    ``expected_text``: the fault in words, for the page.
    """

    name: str
    expected_text: str
    alert: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    shape: Shape = field(default_factory=lambda: Shape(scenario=SMALL, load=Load(rate=0.6)))
    run: Callable[[], Run] = Run
    at_s: float = FAULT_AT_S
    unfinished: str = ""
    """A process that must still run when the alert comes."""


def _shape(*faults: str, **changes: object) -> Shape:
    base = Shape(scenario=SMALL, faults=tuple(faults), load=Load(rate=0.6))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


class _Kill(Run):
    def __init__(self, name: str) -> None:
        self._name = name

    def begin(self, fleet: Fleet) -> None:
        _signal(fleet, self._name, signal.SIGKILL)


class _RestartEngine(Run):
    def begin(self, fleet: Fleet) -> None:
        _signal(fleet, "engine-d0", signal.SIGKILL)
        fleet["engine-d0"].join(10.0)
        fleet.start_engine("d0")


class _StopForAWhile(Run):
    """Stop the process for three quarters of a minute."""

    def __init__(self, name: str) -> None:
        self._name, self._stopped = name, False

    def begin(self, fleet: Fleet) -> None:
        _signal(fleet, self._name, signal.SIGSTOP)
        self._stopped = True

    def go_on(self, fleet: Fleet, since_s: float) -> None:
        if self._stopped and since_s >= _STOPPED_S:
            _signal(fleet, self._name, signal.SIGCONT)
            self._stopped = False


class _PauseHost(Run):
    """Pause engine and sidecar of a host together for a moment every four seconds."""

    def __init__(self, host: str, lasts_s: float) -> None:
        self._names = (f"engine-{host}", f"sidecar-{host}")
        self._lasts_s = lasts_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, fleet: Fleet) -> None:
        self._thread = threading.Thread(target=self._pause, args=(fleet,), name="pauses")
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _pause(self, fleet: Fleet) -> None:
        while not self._over.wait(4.0 - self._lasts_s):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for name in self._names:
                    _signal(fleet, name, number)
                if number is signal.SIGSTOP:
                    self._over.wait(self._lasts_s)


class _CutOff(Run):
    """Cut the way from D's sidecar to the collector.

    ``ways``: the relays that the shape puts there.
    """

    def __init__(self, ways: list[Relay]) -> None:
        self._ways = ways

    def begin(self, fleet: Fleet) -> None:
        for way in self._ways:
            way.cut()

    def end(self) -> None:
        for way in self._ways:
            way.cut()


class _LongStream(Run):
    def begin(self, fleet: Fleet) -> None:
        fleet.start_load(_LONG_STREAM)


def _signal(fleet: Fleet, name: str, number: signal.Signals) -> None:
    os.kill(fleet[name].pid, number)


def _cut_off() -> Case:
    ways: list[Relay] = []

    def behind(collector: str) -> str:
        ways.append(Relay(collector))
        return ways[-1].address

    return Case(
        name="sidecar-cut-off",
        expected_text="D's sidecar cannot reach the collector: its part of every request is missing",
        alert="TraceCoverageLost",
        shape=_shape(behind={"d0": behind}),
        run=lambda: _CutOff(ways),
    )


def _every(fault: str, every_s: float, lasts_s: float, count: int = 40) -> tuple[str, ...]:
    begins = (FAULT_AT_S + number * every_s for number in range(count))
    return tuple(f"{fault}@{begin:g}-{begin + lasts_s:g}" for begin in begins)


def _gpus(*lines: str) -> Scenario:
    return h100(1).add(*lines)


CASES: Final = (
    _cut_off(),
    Case(
        name="clock-bound",
        expected_text="the router takes half a second before it forwards, so no message bounds the hosts' clocks better",
        alert="ClockBoundTooWide",
        shape=_shape("router_slow:router:0.5", apart=True),
        at_s=0.0,
    ),
    Case(
        name="imbalance",
        expected_text="decode runs one request at a time and the others queue, while prefill is idle",
        alert="PrefillDecodeImbalance",
        labels={"role": "decode"},
        shape=_shape("decode_queue:d0:1", load=Load(rate=None, concurrency=9, answer_tokens=(30, 40))),
        at_s=0.0,
    ),
    Case(
        name="stalls",
        expected_text="D's host (engine and sidecar) pauses for 0.4 s every 4 s: both processes are stopped",
        alert="StreamsStalling",
        labels={"cause": "host_pause"},
        shape=_shape(load=Load(rate=0.6, answer_tokens=(40, 60))),
        run=lambda: _PauseHost("d0", 0.4),
    ),
    Case(
        name="host-pause",
        expected_text="D's engine pauses for 0.4 s every 4 s, and its plugin reports it",
        alert="StreamsStalling",
        labels={"cause": "host_pause"},
        shape=_shape(f"host_pause:d0:0.4{_AT}-", load=Load(rate=0.6, answer_tokens=(40, 60))),
    ),
    Case(
        name="ttft-p99",
        expected_text="one request in 25 waits 5 s longer at the router",
        alert="TtftP99High",
        labels={"role": "edge"},
        shape=_shape(*_every("router_slow:router:5", 50, 2), load=Load(rate=1.2, answer_tokens=(4, 8))),
    ),
    Case(
        name="itl-p99",
        expected_text="D's engine pauses for 1.3 s every 4 s: one gap in a hundred and more",
        alert="ItlP99High",
        shape=_shape(f"host_pause:d0:1.3{_AT}-", load=Load(rate=0.6, answer_tokens=(20, 30))),
    ),
    Case(
        name="slow-link",
        expected_text="the link from P to D has a two-hundredth of its bandwidth",
        alert="KvLinkSlow",
        shape=_shape(f"slow_link:p0>d0:200{_AT}-"),
    ),
    Case(
        name="sidecar-down",
        expected_text="the sidecar beside D, off the requests' path, is killed",
        alert="SidecarDown",
        labels={"role": "decode"},
        shape=_shape(proxied=False),
        run=lambda: _Kill("sidecar-d0"),
    ),
    Case(name="collector-down", expected_text="the collector is killed", alert="CollectorDown", run=lambda: _Kill("collector")),
    Case(
        name="engine-silent",
        expected_text="D's and P's engines export no spans",
        alert="EngineSendsNoSpans",
        shape=_shape(spans=False),
        at_s=0.0,
    ),
    Case(
        name="long-stream",
        expected_text="a fetch fails and is computed again, in a stream that goes on for ten minutes",
        alert="KvFetchFailed",
        shape=_shape("fetch_recomputed:p0>d0:1", load=None),
        run=_LongStream,
        unfinished="load",
    ),
    Case(
        name="fetch-failed",
        expected_text="KV fetches fail for 8 s, the first ones ever",
        alert="KvFetchFailed",
        labels={"outcome": "failed"},
        shape=_shape(f"fetch_failed:p0>d0:1{_AT}-{FAULT_AT_S + 8:g}", load=Load(rate=1.5)),
    ),
    Case(
        name="fetch-hung",
        expected_text="one of two links moves nothing more: its fetches neither end nor fail",
        alert="KvFetchHung",
        shape=_shape(f"slow_link:p0>d0:1e9{_AT}-", scenario=SMALL_TWO, prefill=2, load=Load(rate=0.4)),
    ),
    Case(
        name="stale-read",
        expected_text="P frees KV at once and D reads it all the same; clients get HTTP 200",
        alert="KvStaleRead",
        shape=_shape(f"stale_read:p0:0{_AT}-{FAULT_AT_S + 10:g}"),
    ),
    Case(
        name="wrong-request",
        expected_text="the router gives two requests each other's KV; clients get HTTP 200",
        alert="KvWrongRequest",
        shape=_shape(router="tests.oncall.mixing_router", load=Load(rate=1.0)),
    ),
    Case(
        name="lease-expiry",
        expected_text="P's leases end before D comes to read; D computes the prompts again",
        alert="KvExpiring",
        shape=_shape(f"lease_expired:p0:0{_AT}-"),
    ),
    Case(
        name="engine-hung",
        expected_text="D's engine steps no more, and its /health answers 200",
        alert="EngineHung",
        shape=_shape(f"engine_hung:d0:1000{_AT}-", load=Load(rate=0.4)),
    ),
    Case(
        name="engine-restarted",
        expected_text="D's engine is killed and started again",
        alert="EngineRestarted",
        run=_RestartEngine,
    ),
    Case(name="engine-down", expected_text="D's engine is killed", alert="EngineDown", run=lambda: _Kill("engine-d0")),
    Case(
        name="edge-down",
        expected_text="the sidecar before the router is killed",
        alert="EdgeSidecarDown",
        run=lambda: _Kill("edge"),
    ),
    Case(
        name="dropping",
        expected_text=f"D's sidecar, off the requests' path, gets no processor for {_STOPPED_S:g} s",
        alert="HandrailDropping",
        labels={"lost": "handrail_sidecar_plugin_lost_events_total"},
        shape=_shape(proxied=False, load=Load(rate=1.2, answer_tokens=(30, 40))),
        run=lambda: _StopForAWhile("sidecar-d0"),
    ),
    Case(
        name="gpu-lost",
        expected_text="D's GPU is lost (NVML double)",
        alert="GpuLost",
        shape=_shape(gpus={"d0": _gpus(f"at 120 gpu 0 error * {GPU_IS_LOST}")}),
        at_s=120.0,
    ),
    Case(
        name="gpu-throttled",
        expected_text="heat holds the clock of D's GPU down (NVML double)",
        alert="GpuThrottled",
        shape=_shape(gpus={"d0": _gpus("at 120 gpu 0 set reasons 64")}),
        at_s=120.0,
    ),
)
HEALTHY: Final = Case(name="healthy", expected_text="nothing: as many requests as above", alert=None)
