"""Every check, group by group, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from handrail.doctor import checks_engines, checks_gpu, checks_pair, checks_path, checks_wire
from handrail.doctor.facts import Facts
from handrail.doctor.verdict import Finding, Verdict

Checks = Callable[[Facts], Iterator[Finding | None]]

GROUPS: Final[dict[str, Checks]] = {
    "engines": checks_engines.checks,
    "the pair": checks_pair.checks,
    "GPUs": checks_gpu.checks,
    "the wire": checks_wire.checks,
    "ways between": checks_path.checks,
}
"""A check that does not concern these facts yields None."""


def findings(facts: Facts) -> dict[str, list[Finding]]:
    """By group. Pure: the same facts give the same findings."""
    return {group: [found for found in checks(facts) if found is not None] for group, checks in GROUPS.items()}


def counts(found: dict[str, list[Finding]]) -> dict[Verdict, int]:
    """How many of each verdict."""
    verdicts = [finding.verdict for group in found.values() for finding in group]
    return {verdict: verdicts.count(verdict) for verdict in Verdict}


def nothing_was_judged(facts: Facts, found: dict[str, list[Finding]]) -> bool:
    """No check could be made, and nothing was predicted either."""
    number = counts(found)
    return facts.sizes is None and number[Verdict.SKIP] == sum(number.values())
