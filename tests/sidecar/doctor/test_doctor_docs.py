"""docs/doctor.md names every check, every rate and every criterion."""

from __future__ import annotations

import re
from pathlib import Path

from handrail_doctor.checks.handshake import EQUAL
from handrail_doctor.prediction import HOST_STAGED_BYTES_PER_S, RateSource
from handrail_doctor.split_worth import BURSTY, BUSY_SHARE, FAST_BYTES_PER_S, LONG_PROMPT, SLOW_BYTES_PER_S, TTFT_SHARE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
SOURCE = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "sidecar/handrail_doctor/checks").glob("*.py")))


def checks() -> set[str]:
    """Return the check ids in the source, with the sides that f-strings fill in."""
    found = set(re.findall(r'"((?:gpu|wire|pair|path)\.[a-z0-9_]+)"', SOURCE)) | {f"pair.{equal.name}" for equal in EQUAL}
    found |= {f"engine.SIDE.{name}" for name in re.findall(r'f"engine\.\{side\.value\}\.([a-z_]+)"', SOURCE)}
    return found | {
        "engine.prefill",
        "engine.decode",
        "path.prefill_side_channel",
        "path.decode_side_channel",
        "path.otlp",
        "path.clock",
    }


def test_there_are_as_many_as_there_seem() -> None:
    assert len(checks()) > 30


def test_every_check_is_documented() -> None:
    assert [check for check in sorted(checks()) if f"`{check}`" not in PAGE] == []


def test_every_check_of_the_page_exists() -> None:
    documented = set(re.findall(r"`((?:gpu|wire|pair|path|engine)\.[A-Za-z0-9_.]+)`", PAGE))
    assert documented == checks()


def test_every_source_of_a_rate_is_documented() -> None:
    assert [source.value for source in RateSource if f"**{source.value}**" not in PAGE] == []


def test_thresholds_are_those_of_the_code() -> None:
    assert f"{HOST_STAGED_BYTES_PER_S / 1e6:.0f} MB/s" in PAGE
    assert f"below {SLOW_BYTES_PER_S / 1e9:g} GB/s" in PAGE
    assert f"{FAST_BYTES_PER_S / 1e9:g} GB/s and more" in PAGE
    assert f"more than {TTFT_SHARE * 100:g} %" in PAGE
    assert f"less than {BUSY_SHARE * 100:g} %" in PAGE
    assert f"{BURSTY:g} times the mean" in PAGE
    assert f"{LONG_PROMPT:,} tokens and more" in PAGE
