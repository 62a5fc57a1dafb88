"""A scenario: a virtual fleet's hosts, their costs, and its load. A YAML file.

Defaults are round figures for an 8B model in bf16 on one H100 a host, of the size of the ``8b-h100-balanced`` latency profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from handrail_sim.emulator.faults import Hosts
from handrail_sim.emulator.yamlfile import names_in, read_named

FOLDER = Path(__file__).parent / "scenarios"
LAYOUTS = ("split", "collocated")
ROUTINGS = ("random", "round-robin")
LINK_ORDERS = ("shared", "in-turn")
LINK_TRANSPORTS = ("rdma", "tcp")


class ScenarioError(ValueError):
    """The scenario cannot be used.

    The message names the scenario, the key and what is valid.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The settings of a virtual fleet.

    Keys of the file are these names with ``-`` for ``_``. A step costs ``step_ns`` plus the cost of each part of its work.
    """

    name: str = "scenario"
    layout: str = "split"
    model: str = "emulated-8b"
    prefill_hosts: int = 0
    decode_hosts: int = 1  # collocated: all hosts
    # the load
    arrivals_per_s: float = 4.0  # Poisson
    prompt_tokens_min: int = 500
    prompt_tokens_max: int = 4000
    answer_tokens_min: int = 8
    answer_tokens_max: int = 48
    prefix_groups: int = 0  # how many beginnings the prompts share
    prefix_tokens: int = 0  # tokens of each beginning; a multiple of 512
    turns: int = 1  # of a conversation; each prompt is the one before, its answer and new tokens
    turn_gap_s: float = 30.0  # from one turn's arrival to the next one's
    turn_tokens: int = 150  # the new tokens
    kv_return: bool = False  # D sends the KV of its answer back to P
    # of each engine
    max_running: int = 64
    batch_tokens: int = 2048
    chunked_prefill: bool = True
    kv_blocks: int = 16_384
    prefix_cache_blocks: int = 512  # blocks of 512 tokens
    step_ns: int = 10_000_000
    decode_request_ns: int = 60_000
    decode_context_ps: int = 400  # per token to which a request attends
    prefill_token_ns: int = 50_000
    prefill_pair_ps: int = 1000  # per prompt token and token before it: attention
    noise_share: float = 0.03  # standard deviation of a step, as a share of its length
    admission_ns: int = 2_000_000
    respond_ns: int = 300_000
    load_post_token_ns: int = (
        0  # time for which posting a fetch keeps D's thread busy, per token to fetch; a longer one delays its next step
    )
    # between P and D
    router_traces: bool = False  # the router exports its own spans
    hop_ns: int = 200_000  # edge to router, router to engine, and back; D to P
    hop_spread_ns: int = 0  # a hop takes this much longer on average; exponential
    router_ns: int = 500_000
    routing: str = "random"  # or round-robin: each host in turn
    prefill_retries: int = 1  # other hosts that the router tries when P answers with an error
    kv_bytes_per_token: int = 131_072
    link_bytes_per_s: float = 12.5e9
    link_transport: str = "rdma"  # or tcp: the transport of KV, as counters and UCX's log show it
    link_line_bytes_per_s: float = 0.0  # the device's line rate; 0: link_bytes_per_s
    link_order: str = "shared"  # transfers share the bandwidth evenly; or in-turn: one after the other
    handshake_ns: int = 27_000_000

    def faster(self, speed: float) -> Scenario:
        """Return steps, hand-offs and links ``speed`` times as fast, with the same load."""
        if speed == 1:
            return self
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_ns", "_ps")):
                changed[field.name] = max(1, round(value / speed)) if value else 0
            elif field.name.endswith("_bytes_per_s"):
                changed[field.name] = value * speed
        return dataclasses.replace(self, **changed)

    @property
    def line_bytes_per_s(self) -> float:
        """Return the line rate of the device that moves the KV."""
        return self.link_line_bytes_per_s or self.link_bytes_per_s

    def hosts(self) -> Hosts:
        if self.layout == "collocated":
            engines = tuple(f"e{index}" for index in range(self.decode_hosts))
            return Hosts(engines, engines)
        return Hosts(
            tuple(f"p{index}" for index in range(self.prefill_hosts)), tuple(f"d{index}" for index in range(self.decode_hosts))
        )


_HINTS: dict[str, Any] = get_type_hints(Scenario)
_KEYS = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(Scenario)}


def parse(name: str, content: Mapping[str, object]) -> Scenario:
    """Build a scenario.

    Raises ``ScenarioError`` for an unknown key or a bad value.
    """
    unknown = sorted(set(content) - set(_KEYS))
    if unknown:
        raise ScenarioError(f"{name}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    values: dict[str, Any] = {"name": name}
    for key, value in content.items():
        hint = _HINTS[_KEYS[key]]
        valid = isinstance(value, hint) or (hint is float and isinstance(value, int))
        if not valid or (isinstance(value, bool) and hint is not bool):
            raise ScenarioError(f"{name}: {key} is {value!r}; a value of type {hint.__name__} is expected")
        values[_KEYS[key]] = value
    scenario = Scenario(**values)
    for problem, wrong in (
        (f"layout is {scenario.layout!r}; valid: {', '.join(LAYOUTS)}", scenario.layout not in LAYOUTS),
        (f"routing is {scenario.routing!r}; valid: {', '.join(ROUTINGS)}", scenario.routing not in ROUTINGS),
        (f"link-order is {scenario.link_order!r}; valid: {', '.join(LINK_ORDERS)}", scenario.link_order not in LINK_ORDERS),
        (
            f"link-transport is {scenario.link_transport!r}; valid: {', '.join(LINK_TRANSPORTS)}",
            scenario.link_transport not in LINK_TRANSPORTS,
        ),
        (
            "link-line-bytes-per-s is not below link-bytes-per-s",
            scenario.line_bytes_per_s < scenario.link_bytes_per_s,
        ),
        ("load-post-token-ns is 0 or more", scenario.load_post_token_ns < 0),
        ("decode-hosts is 1 or more", scenario.decode_hosts < 1),
        ("prefill-hosts is 1 or more when split, and not given when collocated", _prefill_hosts_wrong(scenario)),
        (
            "prompt-tokens-min is 1 or more and not above prompt-tokens-max",
            not 1 <= scenario.prompt_tokens_min <= scenario.prompt_tokens_max,
        ),
        (
            "answer-tokens-min is 1 or more and not above answer-tokens-max",
            not 1 <= scenario.answer_tokens_min <= scenario.answer_tokens_max,
        ),
        ("arrivals-per-s and link-bytes-per-s are above 0", min(scenario.arrivals_per_s, scenario.link_bytes_per_s) <= 0),
        (
            "turns is 1 or more, and 1 where there are prefix-groups",
            scenario.turns < 1 or (scenario.turns > 1 and scenario.prefix_groups > 0),
        ),
        ("turn-gap-s is above 0 and turn-tokens 1 or more", scenario.turn_gap_s <= 0 or scenario.turn_tokens < 1),
        ("max-running, batch-tokens, kv-blocks and step-ns are 1 or more", _least(scenario) < 1),
        ("prefill-retries is 0 or more", scenario.prefill_retries < 0),
        ("noise-share is 0 to 0.2", not 0 <= scenario.noise_share <= 0.2),
        (
            "prefix-tokens is a multiple of 512 below prompt-tokens-max",
            scenario.prefix_tokens % 512 != 0 or scenario.prefix_tokens >= scenario.prompt_tokens_max,
        ),
    ):
        if wrong:
            raise ScenarioError(f"{name}: {problem}")
    return scenario


def _prefill_hosts_wrong(scenario: Scenario) -> bool:
    return (scenario.prefill_hosts < 1) if scenario.layout == "split" else scenario.prefill_hosts != 0


def _least(scenario: Scenario) -> int:
    return min(scenario.max_running, scenario.batch_tokens, scenario.kv_blocks, scenario.step_ns)


def load(name: str) -> Scenario:
    """Load a bundled scenario by its name, or a file by its path.

    Raises ``ScenarioError``.
    """
    return parse(*read_named(FOLDER, name, ScenarioError))


def bundled() -> list[str]:
    """List the names of the scenarios that come with the package."""
    return names_in(FOLDER)
