"""docs/links.md against the code.

It names every finding, every counter of the table and every transport.
"""

from __future__ import annotations

from pathlib import Path

from handrail.device_counters.link import COUNTERS
from handrail_collector.links.findings import SLOW, LinkFindingKind
from handrail_collector.links.transport import Transport

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "links.md").read_text(encoding="utf-8")


def test_every_finding_has_its_row() -> None:
    assert [kind.value for kind in LinkFindingKind if f"| `{kind.value}` |" not in PAGE] == []


def test_the_reason_of_a_slow_link_is_reported() -> None:
    (sentence,) = [line for line in PAGE.splitlines() if "make a link *slow*" in line]
    assert all(f"`{kind.value}`" in sentence for kind in SLOW)


def test_every_counter_is_on_the_page() -> None:
    assert [counter.name for counter in COUNTERS if f"handrail_link_{counter.name}" not in PAGE] == []


def test_every_transport_is_on_the_page_of_the_API() -> None:
    page = (DOCS / "http-api.md").read_text(encoding="utf-8")
    assert all(f"`{transport.value}`" in page for transport in Transport)
