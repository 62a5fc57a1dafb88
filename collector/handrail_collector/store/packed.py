"""Pack small values into few bytes.

Integers have variable length (LEB128, zigzag). Ids are runs of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def pack_integers(values: Iterable[int]) -> bytes:
    """Encode each value as a zigzag LEB128 number of any size, like protobuf's sint64."""
    out = bytearray()
    for value in values:
        rest = value * 2 if value >= 0 else -value * 2 - 1
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def unpack_integers(data: bytes) -> list[int]:
    """Decode what ``pack_integers`` encoded.

    Raises ``ValueError`` when the last number is cut off.
    """
    values, shift, rest = [], 0, 0
    for byte in data:
        rest |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
            continue
        values.append(rest >> 1 if not rest & 1 else -(rest >> 1) - 1)
        shift = rest = 0
    if shift:
        raise ValueError("a packed integer is cut off")
    return values


def pack_ids(ids: Sequence[str]) -> bytes:
    """Concatenate hex ids of equal length as bytes."""
    return bytes.fromhex("".join(ids))


def unpack_ids(data: bytes, size: int) -> tuple[str, ...]:
    """Split bytes into hex ids of ``size`` bytes each."""
    text = data.hex()
    return tuple(text[at : at + 2 * size] for at in range(0, len(text), 2 * size))
