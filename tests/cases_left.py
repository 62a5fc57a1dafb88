"""What of the reported cases is not shown by a test of its id, and why. ``docs/cases.md`` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEFT: Final[Mapping[str, str]] = {
    # a part of the case is out of reach; the rest is shown by the tests
    "A05": "there is no incident report that puts the line next to the first failure",
    "A07": "redacting hosts: there is no redaction",
    "A10": "the neighbours' gaps at that instant: causes of stalls are issue 5",
    "A11": "that progress came with the other request's arrival is not concluded",
    "A13": "the two ends as one incident, and failures by prompt length: there is no incident report",
    "A16": "tokens of reasoning and of content are not counted apart, since vLLM does not say; that there was no content is",
    "A19": "memory that a dead peer leaves mapped: GPU samples are issue 5",
    "C23": "vLLM's own HTTP server span is read by no adapter: without our edge the row says only the engine's second",
    "C26": "no report of the share per route: each record says its own origin",
    "D23": "a canary probe is not built",
}

NO_TEST: Final[Mapping[str, str]] = {
    # no test bears the id
    "C18": "not tested by its id yet: no adapter for SGLang's spans",
    "C20": "not tested by its id yet: no adapter for SGLang's spans",
}
