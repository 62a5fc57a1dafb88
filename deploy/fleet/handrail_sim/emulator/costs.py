"""How long a step of a virtual engine takes: additive in what the step does, so prefill and decode in one batch slow each other.

Weights read once a step, so much a decoding request and token attended to, so much a prompt token and pair of them: a
simplification of our own, to be fitted by a scenario's figures. Noise belongs to the instant a step begins. To post a transfer
keeps the engine's thread busy while the GPU computes (vLLM does it once the step is launched): the next step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from handrail_sim.emulator.model import ForwardPass
from handrail_sim.emulator.noise import normal
from handrail_sim.emulator.scenario import Scenario


class StepCosts(Protocol):
    """What an engine's work costs, whatever it is drawn from. Faults set the two factors, which else are 1."""

    prefill_factor: float
    step_factor: float

    def step_ns(self, batch: ForwardPass) -> int:
        """One forward pass."""

    def prefill_ns(self, tokens: int) -> int:
        """A prompt alone, in one step."""

    def kv_bytes(self, tokens: int) -> int:
        """What moving the KV of so many tokens takes of a link."""

    def post(self, tokens: int) -> None:
        """The engine posts a transfer of so many tokens' KV now; what that takes of its thread delays the next step."""


class Costs:
    """One engine's, from a scenario."""

    def __init__(self, scenario: Scenario, seed: int, clock: Callable[[], int]) -> None:
        self._scenario = scenario
        self._seed = seed
        self._clock = clock
        self.prefill_factor = 1.0
        self.step_factor = 1.0
        self._posting_until_ns = 0

    def post(self, tokens: int) -> None:
        """The engine posts a transfer of so many tokens' KV now, after those that it is still posting."""
        begins_ns = max(self._posting_until_ns, self._clock())
        self._posting_until_ns = begins_ns + tokens * self._scenario.load_post_token_ns

    def step_ns(self, batch: ForwardPass) -> int:
        costs = self._scenario
        decode = batch.decoding * costs.decode_request_ns + batch.context_tokens * costs.decode_context_ps / 1000
        prefill = batch.prefill_tokens * costs.prefill_token_ns + batch.prefill_pairs * costs.prefill_pair_ps / 1000
        mean = (costs.step_ns + decode + prefill * self.prefill_factor) * self.step_factor
        now_ns = self._clock()
        waits_ns = max(0, self._posting_until_ns - now_ns)
        return max(1, round(mean * (1 + costs.noise_share * normal(self._seed, now_ns)))) + waits_ns

    def prefill_ns(self, tokens: int) -> int:
        """A prompt alone, without its chunks' further steps."""
        costs = self._scenario
        pairs = tokens * tokens / 2
        return round(costs.step_ns + tokens * costs.prefill_token_ns + pairs * costs.prefill_pair_ps / 1000)

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self._scenario.kv_bytes_per_token
