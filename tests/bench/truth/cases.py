"""The runs that are judged: every fault once, chosen so that it matters and leaves most of the run as usual, and runs without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from handrail_fleet import scenario as scenarios
from handrail_fleet.faults import parse
from handrail_fleet.virtual import Settings

SENT_AN_S = 4.0  # by the bundled scenarios
TRACES = Path(__file__).parents[2] / "data" / "request_traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``fault`` holds during the second third of the run, unless it names a time itself.

    ``revealed``: proxies and vLLM's spans hold what is needed to name the phase; else it hides in what vLLM calls queue time.
    """

    name: str
    fault: str = ""
    scenario: str = "split"
    trace: str = ""
    rate: float = 1.0
    revealed: bool = True

    def settings(self, requests: int, seed: int, traces: Path = TRACES) -> Settings:
        chosen = scenarios.load(self.scenario)
        third = requests / chosen.arrivals_per_s / 3
        during = "" if not self.fault or "@" in self.fault else f"@{third:.0f}-{2 * third:.0f}"
        return Settings(
            scenario=chosen,
            requests=requests,
            seed=seed,
            faults=(parse(self.fault + during, chosen.hosts()),) if self.fault else (),
            trace=traces / self.trace if self.trace else None,
            rate=self.rate,
        )

    def without_fault(self) -> Case:
        return replace(self, fault="")


FAULTS = (
    Case(name="slow_prefill", fault="slow_prefill:p0:3"),
    Case(name="prefill_queue", fault="prefill_queue:p0:0.6"),
    Case(name="slow_link", fault="slow_link:p0>d1:30", revealed=False),
    Case(name="no_p2p", fault="no_p2p:p0>d1:350000000", revealed=False),
    Case(name="handshake_cold", fault="handshake_cold:p0>d1:1", revealed=False),
    Case(name="kv_pressure", fault="kv_pressure:d0:0.97", revealed=False),
    Case(name="decode_queue", fault="decode_queue:d0:1", revealed=False),
    Case(name="preemption_storm", fault="preemption_storm:d1:20", revealed=False),
    Case(name="router_slow", fault="router_slow:router:0.4"),
    Case(name="fetch_failed", fault="fetch_failed:p0>d0:0.5"),
    Case(name="fetch_recomputed", fault="fetch_recomputed:p0>d0:0.5"),
    Case(name="lease_expired", fault="lease_expired:p0:0.003"),
    Case(name="bad_host_prefill", fault="bad_host:p1:3"),
    Case(name="bad_host_decode", fault="bad_host:d1:30", revealed=False),
    Case(name="collocated_bad_host", fault="bad_host:e1:3", scenario="collocated"),
    Case(name="collocated_slow_prefill", fault="slow_prefill:e1:3", scenario="collocated"),
    Case(name="prefixes_slow_prefill", fault="slow_prefill:p0:3", scenario="prefixes"),
    Case(name="clock_offset_edge", fault="clock_offset:edge:2@0-"),
    Case(name="clock_offset_decode", fault="clock_offset:d0:-2@0-"),
    Case(name="clock_drift", fault="clock_drift:p0:200@0-"),
)
HEALTHY = tuple(Case(name=f"healthy_{name.replace('-', '_')}", scenario=name) for name in scenarios.bundled())
