"""The result of one check: a status, what was seen, why it matters and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckStatus(str, Enum):
    """The status of one check."""

    PASS = "pass"
    WARN = "warn"  # works, but slower, blinder or more fragile than it needs to be
    FAIL = "fail"  # traffic would fail, or be slow by an order of magnitude
    SKIP = "skip"  # could not be judged: ``seen`` names what was missing


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check.

    ``check``: a stable id, ``group.subject``. ``why`` and ``do`` are empty where all is well.
    """

    check: str
    title: str
    verdict: CheckStatus
    seen: str
    why: str = ""
    do: str = ""


def passed(check: str, title: str, seen: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.PASS, seen=seen)


def skipped(check: str, title: str, missing: str, do: str = "") -> CheckResult:
    """Build a skipped result.

    ``missing``: what could not be seen. ``do``: what would provide it.
    """
    return CheckResult(check=check, title=title, verdict=CheckStatus.SKIP, seen=missing, do=do)


def warned(check: str, title: str, seen: str, *, why: str, do: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.WARN, seen=seen, why=why, do=do)


def failed(check: str, title: str, seen: str, *, why: str, do: str) -> CheckResult:
    return CheckResult(check=check, title=title, verdict=CheckStatus.FAIL, seen=seen, why=why, do=do)
