"""Addresses that a process binds: conflicts between them, and the ready file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from handrail.config.schema import Problem
from handrail.config.types import Address
from handrail.wal.filesystem import REACHABLE_MODE, READABLE_MODE, replace_file


def clashes(addresses: Mapping[str, Address | None]) -> Iterator[Problem]:
    """Settings that would bind the same port."""
    taken: dict[Address, str] = {}
    for path, address in addresses.items():
        if address is None or not address.port:
            continue
        if address in taken:
            example = f"{path}: {Address(address.host, 0)}"
            yield Problem(path=path, value=repr(str(address)), rule=f"is already taken by {taken[address]}", example=example)
        taken.setdefault(address, path)


def bound(**addresses: tuple[str, int] | None) -> dict[str, str]:
    """Bound sockets by name as ``host:port``, without those that are off."""
    return {name: str(Address(*at)) for name, at in addresses.items() if at is not None}


def write_ready(path: Path, addresses: Mapping[str, str]) -> None:
    """Write the ready file: all addresses are bound.

    Content: ``{"pid": ..., "addresses": {...}}``. A reader may open the file as soon as it exists, so it is written under
    another name and renamed. Raises ``OSError``.
    """
    line = json.dumps({"pid": os.getpid(), "addresses": dict(addresses)}) + "\n"
    replace_file(path, line.encode(), READABLE_MODE, REACHABLE_MODE)
