"""The durations of engine steps and KV transfers, drawn from a latency profile.

No clock, no I/O; equal seeds give equal draws.
Follows llm-d-inference-sim (docs/latency-profiles.md): normal draws cut at 30 % and 170 % of the mean, and a factor that grows
linearly from 1 with one running request to ``time-factor-under-load`` with a full batch.
Unlike there, all running requests share a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from handrail_sim.emulator.profile import Profile
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


def with_profile(scenario: Scenario, profile: Profile) -> Scenario:
    """Return the scenario with the profile's batch, hand-off and first contact.

    A profile has no admission time. A ``LatencyModel`` gives the steps.
    """
    return replace(
        scenario,
        max_running=profile.max_num_seqs,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        handshake_ns=profile.handshake_ns,
        link_bytes_per_s=profile.link_bytes_per_s or scenario.link_bytes_per_s,
        admission_ns=0,
    )


class LatencyModel:
    """The ``StepCosts`` of a profile.

    Durations are in ns, divided by ``speed`` (2.0: twice as fast).
    """

    def __init__(self, profile: Profile, seed: int, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"speed is {speed}; it must be above 0")
        self._profile = profile
        self._speed = speed
        self._random = Random(seed)
        self.prefill_factor = 1.0
        self.step_factor = 1.0

    def step_ns(self, batch: ForwardPass) -> int:
        """Draw the duration of one forward pass.

        Prefill and decode share the pass, so it takes as long as the slower of the two: a prefill in a decode batch stalls every
        stream.
        """
        profile = self._profile
        mean, deviation = 0, 0
        if batch.decoding:
            mean, deviation = profile.inter_token_ns, profile.inter_token_sd_ns
        longest = self._draw(mean, deviation)
        if batch.prefill_tokens:
            if profile.calculator == "constant":
                prefill = self._draw(profile.first_token_ns, profile.first_token_sd_ns)
            else:
                prefill = self._draw(
                    profile.prefill_overhead_ns + batch.prefill_tokens * profile.prefill_per_token_ns, profile.prefill_sd_ns
                )
            longest = max(longest, prefill * self.prefill_factor)
        return max(1, round(longest * self.step_factor * self._factor(batch.running) / self._speed))

    def prefill_ns(self, tokens: int) -> int:
        """Return the mean duration of a prompt alone."""
        profile = self._profile
        if profile.calculator == "constant":
            return round(profile.first_token_ns / self._speed)
        return round((profile.prefill_overhead_ns + tokens * profile.prefill_per_token_ns) / self._speed)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes that the profile's link moves in a transfer's drawn time."""
        return round(self.transfer_ns(tokens) * self._speed * self._profile.link_bytes_per_s / 1e9)

    def post(self, tokens: int) -> None:
        """Do nothing, since a profile has no posting time."""

    def transfer_ns(self, tokens: int) -> int:
        """Draw how long the KV of ``tokens`` prompt tokens takes from P to D."""
        profile = self._profile
        mean = profile.transfer_ns if profile.calculator == "constant" else tokens * profile.transfer_per_token_ns
        return round(self._draw(mean, profile.transfer_sd_ns) / self._speed)

    def _factor(self, running: int) -> float:
        most = self._profile.max_num_seqs
        if most == 1:
            return 1.0
        return 1.0 + (self._profile.load_factor - 1.0) * (min(running, most) - 1) / (most - 1)

    def _draw(self, mean: int, deviation: int) -> float:
        if mean <= 0:
            return 0.0
        return min(max(self._random.gauss(mean, deviation), 0.3 * mean), 1.7 * mean)
