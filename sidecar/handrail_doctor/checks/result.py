"""What one check says: a verdict with what was seen, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckStatus(str, Enum):
    """How one check ends."""

    PASS = "pass"
    WARN = "warn"  # works, but slower, blinder or more fragile than it needs to be
    FAIL = "fail"  # traffic would fail, or be slow by an order of magnitude
    SKIP = "skip"  # could not be judged: what was missing stands in ``seen``


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """``check``: a stable id, ``group.subject``. ``why`` and ``do`` are empty where all is well."""

    check: str
    title: str
    verdict: CheckStatus
    seen: str
    why: str = ""
    do: str = ""


def passed(check: str, title: str, seen: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.PASS, seen=seen)


def skipped(check: str, title: str, missing: str, do: str = "") -> CheckResult:
    """``missing``: what could not be seen; ``do``: what would provide it."""
    return CheckResult(check=check, title=title, verdict=CheckStatus.SKIP, seen=missing, do=do)


def warned(check: str, title: str, seen: str, *, why: str, do: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.WARN, seen=seen, why=why, do=do)


def failed(check: str, title: str, seen: str, *, why: str, do: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.FAIL, seen=seen, why=why, do=do)
