"""A latency profile: how long one deployment's steps and KV transfers take.

Costs are drawn from it.
Format and bundled files: llm-d-inference-sim, ``manifests/latency-profiles`` (``profiles/NOTICE.md``). Two calculators:
``constant`` (a fixed time to first token and hand-off) and ``per-token`` (both grow with the prompt). Our own keys have defaults.
Draws follow its docs/latency-profiles.md: normal, cut at 30 % and 170 % of the mean, times a factor that grows linearly from 1
with one running request to ``time-factor-under-load`` with a full batch. Unlike there, all running requests share a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from handrail_sim.emulator.costs import ForwardPass
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.yamlfile import names_in, read_named

FOLDER = Path(__file__).parent / "profiles"

_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m)")

CALCULATORS = ("constant", "per-token")


class ProfileError(ValueError):
    """The profile cannot be used.

    The message names the file, the key and what is valid.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Means and standard deviations of one deployment's latencies, in ns.

    A field that only the other calculator uses is 0.
    """

    name: str
    model: str
    calculator: str
    max_num_seqs: int
    inter_token_ns: int
    inter_token_sd_ns: int = 0
    first_token_ns: int = 0
    first_token_sd_ns: int = 0
    prefill_overhead_ns: int = 0
    prefill_per_token_ns: int = 0
    prefill_sd_ns: int = 0
    transfer_ns: int = 0
    transfer_per_token_ns: int = 0
    transfer_sd_ns: int = 0
    load_factor: float = 1.0  # how many times as long a step takes with a full batch
    handshake_ns: int = 27_000_000  # first contact of a pair: measured on vLLM 0.32 with NIXL over loopback
    kv_bytes_per_token: int = 131_072  # an 8B Llama in bf16: 32 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate that the profile's hand-off times imply.

        A fixed time counts as the time of 1,000 tokens. Returns 0 where a hand-off takes no time.
        """
        if self.calculator == "constant":
            return 1000 * self.kv_bytes_per_token / self.transfer_ns * 1e9 if self.transfer_ns else 0.0
        return self.kv_bytes_per_token / self.transfer_per_token_ns * 1e9 if self.transfer_per_token_ns else 0.0


def duration_ns(text: str) -> int:
    """Parse a duration in Go's notation into ns: ``12ms``, ``250us``, ``1m30s``.

    ``0`` needs no unit. Raises ``ValueError``.
    """
    if text == "0":
        return 0
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration: write 12ms, 250us or 1m30s")
    return round(sum(float(number) * _UNITS_NS[unit] for number, unit in parts))


_DURATIONS = {
    "inter-token-latency": "inter_token_ns",
    "inter-token-latency-std-dev": "inter_token_sd_ns",
    "time-to-first-token": "first_token_ns",
    "time-to-first-token-std-dev": "first_token_sd_ns",
    "prefill-overhead": "prefill_overhead_ns",
    "prefill-time-per-token": "prefill_per_token_ns",
    "prefill-time-std-dev": "prefill_sd_ns",
    "kv-cache-transfer-latency": "transfer_ns",
    "kv-cache-transfer-latency-std-dev": "transfer_sd_ns",
    "kv-cache-transfer-time-per-token": "transfer_per_token_ns",
    "kv-cache-transfer-time-std-dev": "transfer_sd_ns",
    "kv-handshake-time": "handshake_ns",
}
_OTHERS = ("port", "model", "mode", "max-num-seqs", "latency-calculator", "time-factor-under-load", "kv-bytes-per-token")


def parse(name: str, content: Mapping[str, object]) -> Profile:
    """Build the profile in ``content``.

    Raises ``ProfileError`` for an unknown key, a bad value or a missing one.
    """
    unknown = sorted(set(content) - set(_DURATIONS) - set(_OTHERS))
    if unknown:
        raise ProfileError(f"{name}: unknown key {unknown[0]!r}; known: {', '.join(sorted([*_DURATIONS, *_OTHERS]))}")
    calculator = str(content.get("latency-calculator", "per-token"))
    if calculator not in CALCULATORS:
        raise ProfileError(f"{name}: latency-calculator is {calculator!r}; valid: {', '.join(CALCULATORS)}")
    required = ["max-num-seqs", "inter-token-latency"]
    required.append("time-to-first-token" if calculator == "constant" else "prefill-time-per-token")
    missing = [key for key in required if key not in content]
    if missing:
        raise ProfileError(f"{name}: {missing[0]} is missing")
    try:
        durations = {field: duration_ns(str(content[key])) for key, field in _DURATIONS.items() if key in content}
        sizes = {"kv_bytes_per_token": int(str(content["kv-bytes-per-token"]))} if "kv-bytes-per-token" in content else {}
        profile = Profile(
            name=name,
            model=str(content.get("model", name)),
            calculator=calculator,
            max_num_seqs=int(str(content["max-num-seqs"])),
            load_factor=float(str(content.get("time-factor-under-load", 1.0))),
            **durations,
            **sizes,
        )
    except ValueError as error:
        raise ProfileError(f"{name}: {error}") from None
    if profile.max_num_seqs < 1 or profile.load_factor < 1 or profile.inter_token_ns <= 0 or profile.kv_bytes_per_token < 1:
        raise ProfileError(
            f"{name}: max-num-seqs, time-factor-under-load, inter-token-latency and kv-bytes-per-token are 1 or more"
        )
    return profile


def load(name: str) -> Profile:
    """Load a bundled profile by its name, or a file by its path.

    Raises ``ProfileError``.
    """
    return parse(*read_named(FOLDER, name, ProfileError))


def bundled() -> list[str]:
    """List the names of the profiles that come with the package."""
    return names_in(FOLDER)


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
