"""Every check, group by group, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from handrail_doctor.checks import engines, gpu, pair, path, wire
from handrail_doctor.checks.result import CheckResult, CheckStatus
from handrail_doctor.facts import Facts

OWN_GROUP: Final = "Handrail"
"""What Handrail itself needs. The pair works without it, so it comes last and counts apart."""
Checks = Callable[[Facts], Iterator[CheckResult | None]]

GROUPS: Final[dict[str, Checks]] = {
    "engines": engines.checks,
    "the pair": pair.checks,
    "GPUs": gpu.checks,
    "the wire": wire.checks,
    "ways between": path.checks,
    OWN_GROUP: engines.own_checks,
}
"""Each group's checks; a check that does not concern the facts yields None."""


def findings(facts: Facts) -> dict[str, list[CheckResult]]:
    """Return the results by group.

    Pure: the same facts give the same results.
    """
    return {group: [found for found in checks(facts) if found is not None] for group, checks in GROUPS.items()}


def counts(found: dict[str, list[CheckResult]]) -> dict[CheckStatus, int]:
    """Count the results of the pair by status."""
    return _count(finding for group, listed in found.items() if group != OWN_GROUP for finding in listed)


def own_counts(found: dict[str, list[CheckResult]]) -> dict[CheckStatus, int]:
    """Count the results of what Handrail itself needs by status."""
    return _count(found.get(OWN_GROUP, ()))


def nothing_was_judged(facts: Facts, found: dict[str, list[CheckResult]]) -> bool:
    """Test whether no check could be made and nothing was predicted either."""
    number = _count(finding for listed in found.values() for finding in listed)
    return facts.sizes is None and number[CheckStatus.SKIP] == sum(number.values())


def _count(listed: Iterable[CheckResult]) -> dict[CheckStatus, int]:
    verdicts = [finding.verdict for finding in listed]
    return {verdict: verdicts.count(verdict) for verdict in CheckStatus}
