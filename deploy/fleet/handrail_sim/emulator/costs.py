"""The step-time model of a virtual engine: a sum over what the step does.

The sum makes prefill and decode in one batch slow each other.
A step costs one read of the weights, an amount a decoding request and attended token, and an amount a prompt token and pair of
tokens. This is a simplification of our own; a scenario's figures fit it. Noise belongs to the instant at which a step begins.
To post a transfer keeps the engine's thread busy while the GPU computes, so the next step waits for it. vLLM posts once the step
is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from handrail_sim.emulator.noise import normal
from handrail_sim.emulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """The work of one forward pass.

    It makes a token for each of ``decoding`` requests, and computes ``prefill_tokens`` of prompts.
    """

    decoding: int
    prefill_tokens: int
    running: int  # requests that the engine runs, in this pass or not
    context_tokens: int = 0  # tokens to which the decoding requests attend
    prefill_pairs: int = 0  # prompt tokens times the tokens before them: the cost of attention in the prefill grows with it


class StepCosts(Protocol):
    """The costs of an engine's work, whatever model they come from.

    Faults set the two factors, which are 1 otherwise.
    """

    prefill_factor: float
    step_factor: float

    def step_ns(self, batch: ForwardPass) -> int:
        """Return the duration of one forward pass."""

    def prefill_ns(self, tokens: int) -> int:
        """Return the duration of a prompt alone, in one step."""

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes that a transfer of this many tokens' KV puts on a link."""

    def post(self, tokens: int) -> None:
        """Post a transfer of this many tokens' KV now.

        The time that this takes of the engine's thread delays the next step.
        """


class Costs:
    """One engine's costs, from a scenario."""

    def __init__(self, scenario: Scenario, seed: int, clock: Callable[[], int]) -> None:
        self._scenario = scenario
        self._seed = seed
        self._clock = clock
        self.prefill_factor = 1.0
        self.step_factor = 1.0
        self._posting_until_ns = 0

    def post(self, tokens: int) -> None:
        """Post a transfer of this many tokens' KV after those still being posted."""
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
        """Return the duration of a prompt alone, without the further steps of its chunks."""
        costs = self._scenario
        pairs = tokens * tokens / 2
        return round(costs.step_ns + tokens * costs.prefill_token_ns + pairs * costs.prefill_pair_ps / 1000)

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self._scenario.kv_bytes_per_token
