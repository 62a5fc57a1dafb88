"""What one check says: a verdict with what was seen, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """How one check ends."""

    PASS = "pass"
    WARN = "warn"  # works, but slower, blinder or more fragile than it needs to be
    FAIL = "fail"  # traffic would fail, or be slow by an order of magnitude
    SKIP = "skip"  # could not be judged: what was missing stands in ``seen``


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``check``: a stable id, ``group.subject``. ``why`` and ``do`` are empty where all is well."""

    check: str
    title: str
    verdict: Verdict
    seen: str
    why: str = ""
    do: str = ""


def passed(check: str, title: str, seen: str) -> Finding:
    return Finding(check=check, title=title, verdict=Verdict.PASS, seen=seen)


def skipped(check: str, title: str, missing: str, do: str = "") -> Finding:
    """``missing``: what could not be seen; ``do``: what would provide it."""
    return Finding(check=check, title=title, verdict=Verdict.SKIP, seen=missing, do=do)


def warned(check: str, title: str, seen: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, title=title, verdict=Verdict.WARN, seen=seen, why=why, do=do)


def failed(check: str, title: str, seen: str, *, why: str, do: str) -> Finding:
    return Finding(check=check, title=title, verdict=Verdict.FAIL, seen=seen, why=why, do=do)
