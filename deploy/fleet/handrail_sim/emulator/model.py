"""How long an engine's step and a KV transfer take: draws from a profile. No clock, no I/O; equal seeds give equal draws.

Follows llm-d-inference-sim (docs/latency-profiles.md): normal draws cut at 30 % and 170 % of the mean, and a factor that grows
linearly from 1 with one running request to ``time-factor-under-load`` with a full batch. Unlike there, all that run share a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from handrail_sim.emulator.profile import Profile
from handrail_sim.emulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """What one forward pass does: a token for each of ``decoding`` requests, and ``prefill_tokens`` of prompts."""

    decoding: int
    prefill_tokens: int
    running: int  # requests that the engine runs, in this pass or not
    context_tokens: int = 0  # those that the decoding requests attend to
    prefill_pairs: int = 0  # prompt tokens times the tokens before them: what attention in the prefill costs grows with it


def with_profile(scenario: Scenario, profile: Profile) -> Scenario:
    """The scenario with the profile's batch, hand-off and first contact; a profile knows no admission. Its steps are a
    ``LatencyModel``'s."""
    return replace(
        scenario,
        max_running=profile.max_num_seqs,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        handshake_ns=profile.handshake_ns,
        link_bytes_per_s=profile.link_bytes_per_s or scenario.link_bytes_per_s,
        admission_ns=0,
    )


class LatencyModel:
    """Durations in ns, divided by ``speed`` (2.0: twice as fast). A ``StepCosts``."""

    def __init__(self, profile: Profile, seed: int, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"speed is {speed}; it must be above 0")
        self._profile = profile
        self._speed = speed
        self._random = Random(seed)
        self.prefill_factor = 1.0
        self.step_factor = 1.0

    def step_ns(self, batch: ForwardPass) -> int:
        """One forward pass. Prefill and decode share it, so it takes as long as the slower of the two: a prefill in a decode
        batch stalls every stream."""
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
        """The mean for a prompt alone."""
        profile = self._profile
        if profile.calculator == "constant":
            return round(profile.first_token_ns / self._speed)
        return round((profile.prefill_overhead_ns + tokens * profile.prefill_per_token_ns) / self._speed)

    def kv_bytes(self, tokens: int) -> int:
        """As many as the profile's link moves in the time drawn for this transfer."""
        return round(self.transfer_ns(tokens) * self._speed * self._profile.link_bytes_per_s / 1e9)

    def post(self, tokens: int) -> None:
        """A profile does not say what it takes: nothing."""

    def transfer_ns(self, tokens: int) -> int:
        """Moving the KV of ``tokens`` prompt tokens from P to D."""
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
