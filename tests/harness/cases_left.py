"""Reported cases, or parts of them, that no test names by id, with the reason.

``docs/cases.md`` prints the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEFT: Final[Mapping[str, str]] = {
    # a part of the case is out of reach; the tests show the rest
    "A05": "Handrail has no incident report that puts the line next to the first failure",
    "A07": "redacted hosts: Handrail redacts none",
    "A10": "the gaps of the neighbours at that instant: causes of stalls are issue 5",
    "A11": "Handrail does not conclude that progress came with the other request's arrival",
    "A13": "the two ends as one incident, and failures by prompt length: Handrail has no incident report",
    "A16": "vLLM does not report tokens of reasoning and of content separately; the tests show that there was no content",
    "A19": "memory that a dead peer leaves mapped: GPU samples are issue 5",
    "C23": "no adapter reads vLLM's own HTTP server span: without an edge sidecar the row shows only the engine's own second",
    "C26": "there is no report of the share per route: each record states its own origin",
    "D23": "Handrail has no canary probe",
}

NO_TEST: Final[Mapping[str, str]] = {
    # no test has the id
    "C18": "no test of its id yet: there is no adapter for SGLang's spans",
    "C20": "no test of its id yet: there is no adapter for SGLang's spans",
}
