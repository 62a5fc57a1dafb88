"""Mutate recorded inputs as a broken or hostile sender would, by seed.

Pure. Every function takes bytes and the caller's ``random.Random``; the same seed gives the same bytes.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

MOST_BYTES: Final = 256 << 10
"""Most bytes of a mutated input, so that a case takes less than a few ms."""

Mutation: TypeAlias = Callable[[bytes, random.Random], bytes]

EDGES: Final = (
    0,
    1,
    -1,
    127,
    128,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    2**64,
    10**400,
)
"""Integers at the edges of the integer widths."""

TEXTS: Final = (
    b"\x00",
    b"\x1b[2J\x1b]0;x\x07",
    b"\r\n",
    b"\n\n",
    b"\xff\xfe\xfd",
    b"\xc0\xaf",
    b"\xed\xa0\x80",  # a surrogate in UTF-8
    b"\\ud800",  # the same in JSON
    "\u202e\u2066\u200b\U000e0041".encode(),
    b"\xef\xbb\xbf",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"null",
    b"{}",
    b"[]",
    b'""',
    b"true",
    b"../../../../etc/passwd",
    b"%00",
    b"__proto__",
)
"""Pieces that break readers."""

_NUMBER: Final = re.compile(rb"-?\d+(?:\.\d+)?")


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """Flip one to eight bits."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def set_bytes(data: bytes, rng: random.Random) -> bytes:
    """Replace a few bytes by those that mean something to a parser."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 4)) if out else 0):
        out[rng.randrange(len(out))] = rng.choice(b'\x00\xff\x7f\x80"\\{}[]:,\r\n \t=;/%0')
    return bytes(out)


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Cut off an end, or a beginning."""
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.8 else data[at:]


def remove(data: bytes, rng: random.Random) -> bytes:
    """Remove a piece."""
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def duplicate(data: bytes, rng: random.Random) -> bytes:
    """Repeat a piece, up to 200 times."""
    start, end = _span(data, rng)
    times = rng.choice((1, 1, 2, 200))
    return data[:end] + data[start:end] * times + data[end:]


def insert_text(data: bytes, rng: random.Random) -> bytes:
    """Insert a piece that breaks readers."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TEXTS) * rng.choice((1, 1, 1, 50)) + data[at:]


def insert_random(data: bytes, rng: random.Random) -> bytes:
    """Insert random bytes."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 4, 16, 300))) + data[at:]


def change_number(data: bytes, rng: random.Random) -> bytes:
    """Replace a written number by an integer at the edge of a width.

    The number may be a length, a time or a count.
    """
    found = list(_NUMBER.finditer(data))
    if not found:
        return change_varint(data, rng)
    match = rng.choice(found)
    return data[: match.start()] + b"%d" % rng.choice(EDGES) + data[match.end() :]


def change_varint(data: bytes, rng: random.Random) -> bytes:
    """Replace a byte by a huge or overlong varint.

    The byte may be a protobuf length, tag or number.
    """
    at = rng.randrange(len(data) + 1)
    huge = rng.choice(
        (
            b"\xff\xff\xff\xff\x0f",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\xff" * 10 + b"\x7f",
            b"\x80" * 9 + b"\x00",
            b"\x80\x80\x80\x80\x08",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        )
    )
    return data[:at] + huge + data[at + 1 :]


def gzipped(data: bytes, rng: random.Random) -> bytes:
    """Compress the input: whole, cut, in many members, or as a bomb."""
    kind = rng.randrange(4)
    if kind == 0:
        return gzip.compress(data, 1, mtime=0)
    if kind == 1:
        return truncate(gzip.compress(data, 1, mtime=0), rng)
    if kind == 2:
        return gzip.compress(data[:200], 1, mtime=0) * rng.choice((2, 40))
    return gzip.compress(bytes(rng.choice((1 << 20, 12 << 20))), 9, mtime=0)


def splice(first: bytes, second: bytes, rng: random.Random) -> bytes:
    """Join the beginning of one input and the end of another."""
    return first[: rng.randrange(len(first) + 1)] + second[rng.randrange(len(second) + 1) :]


def nested_json(data: bytes, rng: random.Random) -> bytes:
    """Replace a written number by a deeply nested value."""
    depth = rng.choice((50, 101, 1000, 20_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opening * depth + b"1" + closing * (depth if rng.random() < 0.7 else 0)
    found = list(_NUMBER.finditer(data))
    if not found:
        return deep
    match = rng.choice(found)
    return data[: match.start()] + deep + data[match.end() :]


def crossed_lines(data: bytes, rng: random.Random) -> bytes:
    """Shuffle lines; drop some and double some."""
    lines = data.splitlines(keepends=True)
    return b"".join(rng.choices(lines, k=len(lines))) if lines else data


COMMON: Final[tuple[Mutation, ...]] = (
    flip_bits,
    flip_bits,
    set_bytes,
    set_bytes,
    truncate,
    remove,
    duplicate,
    insert_text,
    insert_text,
    insert_random,
    change_number,
)
"""Mutations for any format; the more common ones are listed twice."""


def mutated(data: bytes, others: Sequence[bytes], mutations: Sequence[Mutation], rng: random.Random) -> bytes:
    """Return ``data`` after one to four mutations.

    One time in ten it is spliced with one of ``others``.
    """
    if rng.random() < 0.1:
        data = splice(data, rng.choice(others), rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(mutations)(data, rng)[:MOST_BYTES]
    return data


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Return ``data`` as a socket delivers it.

    It comes whole, cut at a few places, or byte by byte when short.
    """
    kind = rng.randrange(4)
    if kind == 0 or not data:
        return [data]
    if kind == 1 and len(data) <= 512:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 3, 12))))})
    return [data[start:end] for start, end in pairwise(cuts)]


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 4, 32, 500)))
