"""Made-up tokens: count those of a prompt and generate those of an answer.

Equal prompts give equal answers on every engine of the fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from random import Random

from handrail_sim.emulator.kv import PREFIX_TOKENS

_PIECE = re.compile(r"\s*[^\W_]{1,6}|\s*[^\w\s]|\s*_|\s+")
# fmt: off
WORDS = (
    "the", "of", "to", "a", "in", "and", "is", "that", "for", "on", "with", "as", "by", "it", "at", "from", "this", "be",
    "are", "or", "an", "which", "one", "not", "can", "has", "was", "but", "all", "will", "more", "each", "time", "when",
    "first", "then", "two", "other", "some", "these", "its", "only", "new", "such", "may", "over", "most", "also", "after",
    "many", "must", "through", "where", "much", "before", "way", "too", "any", "under", "last", "same", "both", "still",
    "while", "part", "found", "between", "long", "never", "being", "own", "here", "just", "does", "three", "number", "step",
)
# fmt: on
_BEYOND_ASCII = (" é", " ü", " ñ", " ß", " 中", " 文", " –")
_SPLIT_SHARE = 0.03  # tokens that are the first half of a character: their text is empty until the next token completes it


def tokenize(text: str) -> tuple[int, tuple[int, ...]]:
    """Count the tokens of ``text`` and compute the ids of its leading blocks.

    Blocks have ``PREFIX_TOKENS`` tokens. Two ids are equal where all text before their end is equal.
    """
    ends = [piece.end() for piece in _PIECE.finditer(text)]
    cuts = [0, *ends[PREFIX_TOKENS - 1 :: PREFIX_TOKENS]]
    return len(ends), _chained(text[begin:end] for begin, end in pairwise(cuts))


def prefix_blocks(tokens: Sequence[int]) -> tuple[int, ...]:
    """Compute the block ids of a prompt of token ids."""
    cuts = range(0, len(tokens) + 1, PREFIX_TOKENS)
    return _chained(repr(tokens[begin:end]) for begin, end in pairwise(cuts))


def _chained(parts: Iterable[str]) -> tuple[int, ...]:
    digest = b""
    ids = []
    for part in parts:
        digest = blake2b(part.encode("utf-8", "surrogatepass"), digest_size=8, key=digest).digest()
        ids.append(int.from_bytes(digest, "big"))
    return tuple(ids)


def seed_of(text: str, choice: int) -> int:
    """Return the seed of an answer.

    The fleet is deterministic, so two engines give one prompt the same answer.
    """
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, salt=choice.to_bytes(8, "big")).digest(), "big"
    )


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The length of an answer and its finish reason."""

    tokens: int
    finish_reason: str  # length | stop


def plan(seed: int, *, max_tokens: int, min_tokens: int, ignore_eos: bool, end_share: float = 1 / 256) -> AnswerPlan:
    """Decide the length of an answer.

    Each token may be the last with probability ``end_share``, unless ``ignore_eos`` is set.
    """
    if ignore_eos:
        return AnswerPlan(max_tokens, "length")
    random = Random(seed)
    for made in range(1, max_tokens):
        if made >= min_tokens and random.random() < end_share:
            return AnswerPlan(made, "stop")
    return AnswerPlan(max_tokens, "length")


class TokenStream:
    """The texts of an answer, token by token."""

    def __init__(self, seed: int) -> None:
        self._random = Random(~seed)
        self._half: str | None = None

    def take(self, count: int, *, last: bool) -> str:
        """Return the text of the next ``count`` tokens, which may be empty.

        ``last``: half a character at the end becomes U+FFFD.
        """
        text = "".join(self._next() for _ in range(count))
        if last and self._half is not None:
            self._half = None
            text += "\ufffd"
        return text

    def _next(self) -> str:
        if self._half is not None:
            text, self._half = self._half, None
            return text
        if self._random.random() < _SPLIT_SHARE:
            self._half = self._random.choice(_BEYOND_ASCII)
            return ""
        return " " + self._random.choice(WORDS)
