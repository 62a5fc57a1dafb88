"""Define fleets in which streams stall for known reasons.

Each reason can be taken away: it made the stalls that are then gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from handrail_collector.explain.stalls.evidence import StallCause
from handrail_sim.emulator import scenario as scenarios
from handrail_sim.emulator.faults import Fault, parse
from handrail_sim.emulator.scenario import Scenario

Without = Callable[["Setting"], "Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated."""

    scenario: Scenario
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """A fleet with its stall reasons, each with the setting without it."""

    name: str
    setting: Setting
    reasons: tuple[tuple[StallCause, Without], ...]


def _no_prefill(setting: Setting) -> Setting:
    """Return costs with free prompts, so that no stream waits for a prompt."""
    return replace(setting, scenario=replace(setting.scenario, prefill_token_ns=0, prefill_pair_ps=0))


def _no_posting(setting: Setting) -> Setting:
    return replace(setting, scenario=replace(setting.scenario, load_post_token_ns=0))


def _no(fault: str) -> Without:
    return lambda setting: replace(setting, faults=tuple(each for each in setting.faults if each.name != fault))


def _setting(name: str, *faults: str, **changed: object) -> Setting:
    scenario = replace(scenarios.load(name), **changed)  # type: ignore[arg-type]
    return Setting(scenario, tuple(parse(text, scenario.hosts()) for text in faults))


_LONG: Final = {"answer_tokens_min": 150, "answer_tokens_max": 400}
PREFILL: Final = (StallCause.PREFILL_COSCHEDULED, _no_prefill)
POSTING: Final = (StallCause.KV_LANDING, _no_posting)
STORM: Final = (StallCause.PREEMPTION, _no("preemption_storm"))
SLOW_GPU: Final = (StallCause.GPU_THROTTLED, _no("gpu_throttled"))
PAUSES: Final = (StallCause.HOST_PAUSE, _no("host_pause"))
CLIENTS: Final = (StallCause.CLIENT_BACKPRESSURE, _no("client_slow"))

SCENES: Final = (
    Scene("collocated", _setting("collocated", arrivals_per_s=3.0, **_LONG), (PREFILL,)),
    Scene("collocated_unchunked", _setting("collocated-unchunked", arrivals_per_s=3.0, **_LONG), (PREFILL,)),
    Scene("kv_landing", _setting("split", arrivals_per_s=3.0, load_post_token_ns=20_000, **_LONG), (POSTING,)),
    Scene("preemption_storm", _setting("split", "preemption_storm:*:0.5", arrivals_per_s=3.0, **_LONG), (STORM,)),
    Scene("gpu_throttled", _setting("split", "gpu_throttled:d0:4", arrivals_per_s=3.0, **_LONG), (SLOW_GPU,)),
    Scene("host_pause", _setting("split", "host_pause:*:0.15", arrivals_per_s=3.0, **_LONG), (PAUSES,)),
    Scene(
        "client_slow",
        _setting("split", "client_slow:edge:12", arrivals_per_s=1.0, answer_tokens_min=500, answer_tokens_max=900),
        (CLIENTS,),
    ),
    Scene(
        "collocated_mixed",
        _setting("collocated", "host_pause:*:0.2", "gpu_throttled:e0:4", "preemption_storm:e1:0.5", arrivals_per_s=2.0, **_LONG),
        (PREFILL, PAUSES, SLOW_GPU, STORM),
    ),
    Scene(
        "split_mixed",
        _setting("split", "host_pause:d0:0.2", "gpu_throttled:d1:4", arrivals_per_s=3.0, load_post_token_ns=20_000, **_LONG),
        (POSTING, PAUSES, SLOW_GPU),
    ),
)
