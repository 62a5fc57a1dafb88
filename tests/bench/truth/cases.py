"""Define the runs that are judged.

There is a run for every fault, chosen so that the fault matters and leaves most of the run as usual. There are also runs
without a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.faults import Fault, parse
from handrail_sim.emulator.virtual_run import VirtualRunSettings
from handrail_sim.emulator.workload import WorkloadRequest

BEGINS, ENDS = 0.37, 0.68  # shares of the run: about a third, and no time window of the naming begins or ends there
TRACES = Path(__file__).parents[2] / "data" / "request_traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One judged run; ``fault`` holds from ``BEGINS`` to ``ENDS`` of the run.

    ``clocks``: clock faults, which hold for the whole run.
    ``trace``: the beginning of the name of a file of published arrivals.
    """

    name: str
    fault: str = ""
    scenario: str = "split"
    trace: str = ""
    rate: float = 1.0
    clocks: tuple[str, ...] = ()

    def settings(self, requests: int, seed: int, traces: Path = TRACES) -> VirtualRunSettings:
        """Return the settings of the run without the fault."""
        chosen = scenarios.load(self.scenario)
        trace = next(iter(sorted(traces.glob(f"{self.trace}*"))), traces / self.trace) if self.trace else None
        return VirtualRunSettings(scenario=chosen, requests=requests, seed=seed, trace=trace, rate=self.rate)

    def faults(self, plans: Sequence[WorkloadRequest]) -> tuple[Fault, ...]:
        if not self.fault:
            return ()
        lasts_s = plans[-1].arrival.at_ns / 1e9
        texts = (f"{self.fault}@{BEGINS * lasts_s:.3f}-{ENDS * lasts_s:.3f}", *self.clocks)
        return tuple(parse(text, scenarios.load(self.scenario).hosts()) for text in texts)


_WRONG_CLOCKS = ("clock_offset:edge:2", "clock_offset:p0:-2", "clock_offset:d1:2", "clock_offset:router:-2")
CASES = (
    Case(name="slow_prefill", fault="slow_prefill:p0:3"),
    Case(name="prefill_queue", fault="prefill_queue:p0:0.8"),
    Case(name="prefill_queue_mild", fault="prefill_queue:p0:0.6"),
    Case(name="router_slow", fault="router_slow:router:0.4"),
    Case(name="fetch_failed", fault="fetch_failed:p0>d0:0.5"),
    Case(name="fetch_recomputed", fault="fetch_recomputed:p0>d0:0.5"),
    Case(name="lease_expired", fault="lease_expired:p0:0.003"),
    Case(name="stale_read", fault="stale_read:p0:0.003"),
    Case(name="prefill_failed", fault="prefill_failed:p0:0.9"),
    Case(name="bad_host_p", fault="bad_host:p1:3"),
    Case(name="slow_link", fault="slow_link:p0>d1:30"),
    Case(name="no_p2p", fault="no_p2p:p0>d1:350000000"),
    Case(name="handshake_cold", fault="handshake_cold:p0>d1:1"),
    Case(name="kv_pressure", fault="kv_pressure:d0:0.98"),
    Case(name="kv_pressure_mild", fault="kv_pressure:d0:0.97"),
    Case(name="kv_pressure_hung", fault="kv_pressure:d0:0.99"),
    Case(name="decode_queue", fault="decode_queue:d0:1"),
    Case(name="preemption_storm", fault="preemption_storm:d1:20"),
    Case(name="bad_host_d", fault="bad_host:d1:30"),
    Case(name="collocated_bad_host", fault="bad_host:e1:3", scenario="collocated"),
    Case(name="collocated_slow_prefill", fault="slow_prefill:e1:3", scenario="collocated"),
    Case(name="prefixes_slow_prefill", fault="slow_prefill:p0:3", scenario="prefixes"),
    Case(name="turns_slow_link", fault="slow_link:p1>d0:60", scenario="turns"),
    Case(name="azure_slow_prefill", fault="slow_prefill:p0:4", trace="AzureLLMInferenceTrace_conv"),
    Case(name="azure_slow_link", fault="slow_link:p0>d1:60", trace="AzureLLMInferenceTrace_conv"),
    Case(name="mooncake_bad_host_p", fault="bad_host:p0:4", trace="mooncake_conversation", rate=0.1),
    Case(name="mooncake_bad_host_p_mild", fault="bad_host:p0:2", trace="mooncake_conversation", rate=0.2),
    Case(name="clock_offset_slow_prefill", fault="slow_prefill:p0:3", clocks=_WRONG_CLOCKS),
    Case(name="clock_offset_slow_link", fault="slow_link:p0>d1:30", clocks=_WRONG_CLOCKS),
    Case(name="clock_offset_router_slow", fault="router_slow:router:0.4", clocks=_WRONG_CLOCKS),
    Case(name="clock_drift_slow_prefill", fault="slow_prefill:p0:3", clocks=("clock_drift:p0:200", "clock_drift:d1:-200")),
    *(Case(name=f"healthy_{name.replace('-', '_')}", scenario=name) for name in ("split", "collocated", "prefixes", "turns")),
    Case(name="healthy_collocated_unchunked", scenario="collocated-unchunked"),
    Case(name="healthy_azure", trace="AzureLLMInferenceTrace_conv"),
    Case(name="healthy_mooncake", trace="mooncake_conversation", rate=0.1),
)
