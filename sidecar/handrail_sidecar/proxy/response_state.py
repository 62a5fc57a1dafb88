"""State of one response so far, for every API.

The dialects write it; the facts are read from it.
"""

from __future__ import annotations

from typing import Any, Final

from handrail.records import KvParams
from handrail_sidecar.proxy.json_access import mapping, name, token_count, word
from handrail_sidecar.proxy.request_body import kv_params
from handrail_sidecar.proxy.token_timing import INDEX_LIMIT, Cadence

# Names of the counts in the APIs.
_PROMPT: Final = ("prompt_tokens", "input_tokens")
_OUTPUT: Final = ("completion_tokens", "output_tokens")
_CACHED: Final = ("cached_tokens", "cache_read_input_tokens")
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
TURNS_LIMIT: Final = 8


class Tally:
    """What was read of one response.

    ``choices``: how many the request asked for. 1 puts everything on one choice, whatever ``index`` says; None: unknown.
    """

    def __init__(self, choices: int | None) -> None:
        self._choices = choices
        self.cadence = Cadence()
        # With the number of choices unknown, the index may be a token counter: the same chunks are also taken as one choice.
        self._single = Cadence() if choices is None else None
        self.first_token_ns: int | None = None
        self.first_text_ns: int | None = None
        self.text_kind: str | None = None
        self.last_content_ns: int | None = None
        self.finish_ns: int | None = None
        self.events = 0
        self.tool_calls = 0
        self.reasoning = 0  # of the chunks with content
        self.turns: list[tuple[int, str]] = []  # when content of another kind came before, and which kinds: ``reasoning>text``
        self._kind: str | None = None
        self.lost_first = False  # an event that could not be read came before the first token
        self.lost_events = 0
        self.response_id: str | None = None
        self.model: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.kv: KvParams | None = None
        self.error = False
        self.error_type: str | None = None
        self.error_code: str | None = None
        self.done = False  # [DONE], message_stop, response.completed
        self.incomplete = False
        self.aborted = False
        self._begun: set[int] = set()
        self._reasons: dict[int, str] = {}

    @property
    def choices_known(self) -> bool:
        """Whether the number of choices in the request is known."""
        return self._choices is not None

    def chunk(self, index: int, at_ns: int, kind: str | None, presumed: bool, total: int | None, ids: int | None) -> None:
        """Add one chunk of one choice.

        ``kind``: of its content, or None. See ``Cadence.chunk`` for the rest.
        """
        if self._choices == 1:
            index = 0
        else:
            if len(self._begun) < INDEX_LIMIT:
                self._begun.add(index)
            if self._single is not None:
                self._single.chunk(0, at_ns, kind is not None, presumed, total, ids)
        token = self.cadence.chunk(index, at_ns, kind is not None, presumed, total, ids)
        if token and self.first_token_ns is None:
            self.first_token_ns = at_ns
        if kind is not None:
            self.events += 1
            self.last_content_ns = at_ns
            if kind != self._kind:
                self._turn(kind, at_ns)
            if kind == "tool_call":
                self.tool_calls += 1
            elif kind == "reasoning":
                self.reasoning += 1
            if self.first_text_ns is None:
                self.first_text_ns = at_ns
                self.text_kind = kind

    def _turn(self, kind: str, at_ns: int) -> None:
        if self._kind is not None and len(self.turns) < TURNS_LIMIT:
            self.turns.append((at_ns, f"{self._kind}>{kind}"))
        self._kind = kind

    def finished(self, index: int, reason: str, at_ns: int | None) -> None:
        """Note the finish reason of a choice."""
        text = word(reason) or "other"
        if len(self._reasons) < INDEX_LIMIT:
            self._reasons[0 if self._choices == 1 else index] = text
        if at_ns is not None:
            self.finish_ns = at_ns
        self.error = self.error or text == "error"
        self.aborted = self.aborted or text in ("abort", "cancelled")

    def lost(self) -> None:
        """Count an event that could not be read (malformed or too large)."""
        self.lost_events += 1
        self.lost_first = self.lost_first or self.first_token_ns is None
        for cadence in (self.cadence, self._single):
            if cadence is not None:
                cadence.lost()

    def named(self, response_id: object, model: object) -> None:
        """Note id and model; the first ones stay."""
        self.response_id = self.response_id or name(response_id)
        self.model = self.model or name(model)

    def used(self, usage: object) -> None:
        """Note a usage object of any API; the last value of each count stays."""
        found = mapping(usage)
        details: dict[str, Any] = next((found[key] for key in _DETAILS if isinstance(found.get(key), dict)), {})
        cached = _first({**found, **details}, _CACHED)
        self.counts(_first(found, _PROMPT), _first(found, _OUTPUT), cached)

    def counts(self, prompt: int | None, output: int | None, cached: int | None) -> None:
        """Note token counts of the server; None keeps the known value."""
        if prompt is not None:
            self.prompt_tokens = prompt
        if output is not None:
            self.output_tokens = output
        if cached is not None:
            self.cached_tokens = cached

    def handed_over(self, params: object) -> None:
        """Note the ``kv_transfer_params`` of the response."""
        self.kv = kv_params(params) or self.kv

    def failed(self, error: object) -> None:
        """Note an error object, or anything else that only shows that there was an error.

        Its type and code are kept if they are words.
        """
        self.error = True
        self.error_type = self.error_type or word(mapping(error).get("type"))
        self.error_code = self.error_code or word(mapping(error).get("code"))

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons by choice index."""
        return tuple(self._reasons[index] for index in sorted(self._reasons))

    @property
    def all_finished(self) -> bool:
        """Whether every choice that appeared, at least one, has a finish reason."""
        if self._counts_in_index:
            return bool(self._reasons)
        return bool(self._reasons) and self._begun <= self._reasons.keys()

    @property
    def _counts_in_index(self) -> bool:
        return self._single is not None and self.cadence.each_index_once and len(self._reasons) <= 1

    @property
    def measured(self) -> Cadence:
        """The cadence to use.

        It is that of one choice when the index was used as a token counter, otherwise the one choice by choice.
        """
        return self._single if self._single is not None and self._counts_in_index else self.cadence


def _first(found: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((count for key in keys if (count := token_count(found.get(key))) is not None), None)
