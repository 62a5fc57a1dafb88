"""Decide what a start does with files that the manifest does not name.

This module has no side effects. A start removes a file only when it is provably ours and unfinished:
a temporary file;
a file of the one publish that comes next after everything listed (its line was never written, so it was never
acknowledged as stored, and the journal has its entries);
a fold whose rows all lie in listed files;
a rollup, which is made from rows.
Every other file may be the only copy of its rows and is set aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from handrail_collector.store.durable_dir import TEMPORARY
from handrail_collector.store.layout import SUFFIX
from handrail_collector.store.manifest import RESTORE, PublishRecord, StoreDamagedError, counted
from handrail_collector.store.schema import Table

UNLISTED = ".unlisted"
"""Suffix of a file that was set aside; nothing reads it."""

_NAME = re.compile(r"[a-z]+-(?P<shard>\d{3})-(?P<first>\d{20})-(?P<end>\d{20})-(?P<fold>c?)\d{3,}" + re.escape(SUFFIX))


@dataclass(frozen=True, slots=True)
class Unlisted:
    """What a start does with unlisted files; paths are relative to the store's root."""

    remove: tuple[str, ...]
    aside: tuple[str, ...]


def sorted_out(
    unlisted: Collection[str], publishes: Iterable[PublishRecord], rows: Callable[[str], int | None], where: str
) -> Unlisted:
    """Sort unlisted files into those to remove and those to set aside.

    ``unlisted``: files on disk that neither a line nor a head names. ``rows``: rows of a file, None when it is unreadable.
    Raises ``StoreDamagedError`` when files of more than one publish lie beyond the listed ones: then lines are missing.
    """
    known = tuple(publishes)
    ends = _ends(known)
    remove, aside = [], []
    beyond: dict[int, dict[int, list[str]]] = {}
    for path in sorted(unlisted):
        name = _NAME.fullmatch(PurePosixPath(path).name)
        if path.endswith(TEMPORARY) or path.startswith(f"{Table.ROLLUPS.value}/"):
            remove.append(path)
        elif name is None:
            aside.append(path)
        elif name["fold"]:
            (remove if _rows_are_listed(path, name, known, rows) else aside).append(path)
        elif (first := int(name["first"])) >= ends.get(int(name["shard"]), 0):
            beyond.setdefault(int(name["shard"]), {}).setdefault(first, []).append(path)
        else:
            aside.append(path)
    for shard, firsts in beyond.items():
        paths = [path for each in firsts.values() for path in each]
        if len(firsts) > 1:
            raise StoreDamagedError(
                f"{where} ends at offset {ends.get(shard, 0)}, and {counted(len(paths))} of {len(firsts)} later publishes "
                f"exist, such as {paths[-1]}: lines are missing; {RESTORE}"
            )
        remove += paths
    return Unlisted(tuple(remove), tuple(aside))


def _ends(publishes: Iterable[PublishRecord]) -> Mapping[int, int]:
    ends: dict[int, int] = {}
    for publish in publishes:
        ends[publish.shard] = max(publish.end_offset, ends.get(publish.shard, 0))
    return ends


def _rows_are_listed(
    path: str, name: re.Match[str], publishes: Iterable[PublishRecord], rows: Callable[[str], int | None]
) -> bool:
    """Check whether the rows of a fold are still in listed files.

    They are when the listed files of its hour within its range have at least as many rows.
    """
    shard, first, end = (int(name[each]) for each in ("shard", "first", "end"))
    folder = PurePosixPath(path).parent
    within = sum(
        file.rows
        for publish in publishes
        if publish.shard == shard and first <= publish.first_offset and publish.end_offset <= end
        for file in publish.files
        if PurePosixPath(file.path).parent == folder
    )
    found = rows(path)
    return found is not None and found <= within
