"""Ways to damage a Parquet file."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def spoilt(data: bytes) -> bytes:
    """Spoil a page so that it does not decompress; footer and statistics stay whole."""
    return data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :]


def one_bit(data: bytes) -> bytes:
    """Flip the first bit that a reader accepts without an error, as another value."""
    rows = pq.ParquetFile(io.BytesIO(data)).read()
    for at in range(4, len(data)):
        turned = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with contextlib.suppress(pa.ArrowException, OSError):
            if not pq.ParquetFile(io.BytesIO(turned)).read().equals(rows):
                return turned
    raise AssertionError("every bit is looked after")


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "other_bytes": lambda data: b"PAR1 no more",
    "cut": lambda data: data[:-300],
    "empty": lambda data: b"",
    "missing": lambda data: None,
    "spoilt_pages": spoilt,
    "one_bit": one_bit,
}


def damage(path: Path, how: Callable[[bytes], bytes | None]) -> bytes:
    """Damage a file in place; return the bytes that it had before."""
    data = path.read_bytes()
    left = how(data)
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    return data
