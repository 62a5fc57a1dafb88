"""Measure when the tokens of a response came.

Gaps are per choice index, per chunk and (when the tokens of each chunk are known) per token.
Definitions (DESIGN section 5): a stream gap is the time between chunks with content of one choice; a token without text is a
token but no content, so it makes no stream gap. Tokens per chunk are known from running totals (continuous usage) or token ids
only; then the time since the last token is spread over the chunk's tokens. No gap is measured across an event that could not
be read. Memory does not grow with the stream: gaps fold into a sketch, and at most ``INDEX_LIMIT`` choices are kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Gaps
from handrail.stalls import Stalls, StallWatch

INDEX_LIMIT: Final = 4096
_FOLD: Final = 512  # gaps kept as numbers before they go into the sketch, which is quicker for many at once

TakeGaps = Callable[[list[int]], None]
"""Takes new stream gaps, in ns."""

TakeShares = Callable[[list[tuple[int, int]]], None]
"""Takes new per-token gaps: ns of each token, and the number of tokens."""


class _Log:
    """Gaps of one unit."""

    __slots__ = (
        "_ends",
        "_fresh",
        "_reported",
        "_shares",
        "_sketch",
        "_stalls",
        "_sum_ns",
        "max_at_ns",
        "max_ns",
        "take_gaps",
        "take_shares",
        "unit",
    )

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.max_ns = -1
        self.max_at_ns = 0
        self._fresh: list[int] = []
        self._ends: list[int] = []  # of the fresh ones
        self._sketch = GapSketch()
        self._stalls = StallWatch()
        self._sum_ns = 0
        self._reported = 0  # of the fresh ones
        self._shares: list[tuple[int, int]] = []  # not passed on yet
        self.take_gaps: TakeGaps | None = None
        self.take_shares: TakeShares | None = None

    def add(self, gap_ns: int, at_ns: int) -> None:
        """Add one gap that ended at ``at_ns``.

        A clock that stepped back counts as no time at all.
        """
        if gap_ns < 0:
            gap_ns = 0
        if gap_ns > self.max_ns:
            self.max_ns = gap_ns
            self.max_at_ns = at_ns
        fresh = self._fresh
        fresh.append(gap_ns)
        self._ends.append(at_ns)
        if len(fresh) >= _FOLD:
            self._fold()

    def spread(self, gap_ns: int, tokens: int, at_ns: int) -> None:
        """Add one gap shared by ``tokens`` tokens.

        It makes as many samples of an equal part. The sum stays exact.
        """
        gap_ns = max(gap_ns, 0)
        each = gap_ns // tokens
        if each > self.max_ns:
            self.max_ns, self.max_at_ns = each, at_ns
        self._sketch.add(each, tokens)
        self._sum_ns += gap_ns - each * tokens
        if self.take_shares is not None:
            self._shares.append((each, tokens))
            if len(self._shares) >= _FOLD:
                self.tell()

    def tell(self) -> None:
        """Pass on the gaps since the last call."""
        if self.take_gaps is not None and self._reported < len(self._fresh):
            self.take_gaps(self._fresh[self._reported :])
            self._reported = len(self._fresh)
        if self.take_shares is not None and self._shares:
            shares, self._shares = self._shares, []
            self.take_shares(shares)

    def _fold(self) -> None:
        self.tell()
        self._reported = 0
        self._sketch.extend(self._fresh)
        self._stalls.extend(self._fresh, self._ends)
        self._fresh.clear()
        self._ends.clear()

    def gaps(self) -> Gaps | None:
        self._fold()
        if not self._sketch.count:
            return None
        return Gaps(
            unit=self.unit,
            count=self._sketch.count,
            sum_ns=self._sketch.sum_ns + self._sum_ns,
            max_ns=self.max_ns,
            max_at_ns=self.max_at_ns,
            sketch=self._sketch.encode(),
        )

    def stalls(self) -> Stalls | None:
        """Stalls among the gaps that were added one by one."""
        self._fold()
        return self._stalls.stalls()


class _ChoiceTiming:
    """State of one choice.

    ``tokens`` is its running total as the server counts it, or the number of ids counted here.
    """

    __slots__ = ("chunks", "content_ns", "first_ns", "last_ns", "token_ns", "tokens")

    def __init__(self) -> None:
        self.content_ns: int | None = None  # last chunk with content
        self.token_ns: int | None = None  # last chunk whose number of tokens is known
        self.first_ns: int | None = None
        self.last_ns = 0
        self.tokens = 0
        self.chunks = 0


class Cadence:
    """The times of one response's tokens, choice by choice."""

    def __init__(self) -> None:
        self._choices: dict[int, _ChoiceTiming] = {}
        self._gaps = _Log("chunk")
        self._itl = _Log("token")
        self._totals = False  # the server counts tokens itself
        self._lost = False
        self._known = True  # the number of tokens of every token chunk so far
        self._overflow = False
        self._in_turn = True  # new indices came in ascending order
        self._highest = -1

    def chunk(self, index: int, at_ns: int, content: bool, presumed: bool, total: int | None, ids: int | None) -> bool:
        """Add one chunk of one choice; return whether it brought a token.

        ``content``: it has text, reasoning, a tool call or a refusal. ``presumed``: it has none but looks like a token whose text
        is empty; the counts, if there are any, decide. ``total``: running token count of this choice. ``ids``: its token ids.
        """
        choice = self._choices.get(index)
        if choice is None:
            choice = self._open(index)
        tokens: int | None = None
        if ids is not None:
            tokens = ids
            choice.tokens = choice.tokens + ids if total is None else total
        elif total is not None:
            # The first total after chunks without one is the sum at the end, not what this chunk brought.
            tokens = total - choice.tokens if self._known else None
            choice.tokens = total
            self._totals = True
        if content:
            choice.chunks += 1
            before = choice.content_ns
            choice.content_ns = at_ns
            if before is not None:
                self._gaps.add(at_ns - before, at_ns)
        elif not presumed if tokens is None else tokens <= 0:
            return False
        if choice.first_ns is None:
            choice.first_ns = at_ns
        choice.last_ns = at_ns
        if tokens is None:
            self._known = False
        elif tokens > 0:
            if choice.token_ns is not None and self._known:
                self._itl.spread(at_ns - choice.token_ns, tokens, at_ns)
            choice.token_ns = at_ns
        return True

    def _open(self, index: int) -> _ChoiceTiming:
        choice = _ChoiceTiming()
        if len(self._choices) < INDEX_LIMIT:
            self._in_turn = self._in_turn and index > self._highest
            self._highest = max(index, self._highest)
            self._choices[index] = choice
        else:
            self._overflow = True
        return choice

    def follow(self, gaps: TakeGaps, shares: TakeShares | None) -> None:
        """Make ``tell`` pass on new gaps from now on.

        Gaps per token are passed on when ``shares`` is given.
        """
        self._gaps.take_gaps, self._itl.take_shares = gaps, shares

    def tell(self) -> None:
        """Pass on the gaps since the last call."""
        self._gaps.tell()
        self._itl.tell()

    def lost(self) -> None:
        """Note an event that could not be read; it may have held tokens of any choice."""
        self._lost = True
        for choice in self._choices.values():
            choice.content_ns = choice.token_ns = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens of all choices.

        The server's totals count; without them the token ids, when every chunk with tokens had them.
        """
        total = sum(choice.tokens for choice in self._choices.values())
        return total if total and (self._totals or (self._known and not self._lost)) else None

    @property
    def each_index_once(self) -> bool:
        """Whether the indices count up and none had a second chunk.

        This happens when a server numbers its tokens in ``index``.
        """
        return self._in_turn and len(self._choices) > 2 and all(choice.chunks <= 1 for choice in self._choices.values())

    def gaps(self) -> Gaps | None:
        return self._gaps.gaps()

    def stalls(self) -> Stalls | None:
        """Stream gaps far above those around them, of all choices together.

        One engine runs all choices in the same steps.
        """
        return self._gaps.stalls()

    def itl(self, output_tokens: int | None, *, trusted: bool) -> Gaps | None:
        """Per-token gaps.

        None unless the tokens of every chunk are known and their sum agrees with the server's at the end.
        ``trusted``: the request asked for running totals, so they count when the stream ended without a sum.
        """
        counted = self.output_tokens if self._known and not self._overflow else None
        agreed = counted is not None and (counted == output_tokens or (output_tokens is None and (trusted or not self._totals)))
        return self._itl.gaps() if agreed else None

    def tpot_mean_ns(self, output_tokens: int | None) -> int | None:
        """Mean time per output token after the first of each choice.

        None when tokens or times do not allow one.
        """
        started = [choice for choice in self._choices.values() if choice.first_ns is not None]
        if output_tokens is None or output_tokens <= len(started) or self._overflow:
            return None
        spent = sum(choice.last_ns - (choice.first_ns or 0) for choice in started)
        return round(spent / (output_tokens - len(started))) if spent > 0 else None
