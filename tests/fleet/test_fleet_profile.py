"""Latency profiles: the bundled ones load, and mistakes are named.

Durations are read as Go writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail_sim.emulator.profile import ProfileError, bundled, duration_ns, load, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("12ms", 12_000_000), ("250us", 250_000), ("2.5ms", 2_500_000), ("1m30s", 90_000_000_000), ("3µs", 3_000)],
)
def test_durations(text: str, expected: int) -> None:
    assert duration_ns(text) == expected


@pytest.mark.parametrize("text", ["", "12", "ms", "12 ms", "12msx", "-1ms"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_ns(text)


def test_all_bundled_profiles_load() -> None:
    assert len(bundled()) == 6
    for name in bundled():
        profile = load(name)
        assert profile.inter_token_ns > 0
        per_token = profile.calculator == "per-token"
        assert (profile.prefill_per_token_ns > 0) == per_token
        assert (profile.first_token_ns > 0) == (not per_token)
        assert profile.transfer_sd_ns > 0


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("max-num-seqs: 2\ninter-token-latency: 5ms\nprefill-time-per-token: 1us\nkv-bytes-per-token: 7\n")
    profile = load(str(path))
    assert (profile.name, profile.max_num_seqs, profile.kv_bytes_per_token) == ("mine", 2, 7)


GOOD: dict[str, Any] = {"max-num-seqs": 2, "inter-token-latency": "5ms", "prefill-time-per-token": "1us"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**GOOD, "inter-token-latancy": "1ms"}, "unknown key 'inter-token-latancy'"),
        ({**GOOD, "latency-calculator": "quadratic"}, "valid: constant, per-token"),
        ({**GOOD, "latency-calculator": "constant"}, "time-to-first-token is missing"),
        ({"max-num-seqs": 2}, "inter-token-latency is missing"),
        ({**GOOD, "inter-token-latency": 5}, "is not a duration"),
        ({**GOOD, "max-num-seqs": 0}, "1 or more"),
        ({**GOOD, "time-factor-under-load": 0.5}, "1 or more"),
    ],
    ids=["key", "calculator", "constant", "missing", "unit", "no batch", "factor"],
)
def test_mistakes_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse("x", content)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="8b-h100-balanced-per-token"):
        load("8b-h100")
