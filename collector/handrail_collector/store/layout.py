"""Define the folders of the store.

The rows of an hour lie in ``<table>/day=YYYY-MM-DD/hour=HH`` below the store's root. Times are UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from handrail_collector.store.durable_dir import TEMPORARY
from handrail_collector.store.schema import Table

SUFFIX = ".parquet"

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_SECOND_NS = 1_000_000_000
_DATA_PATH = re.compile(
    rf"(?:{'|'.join(table.value for table in Table)})/day=[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}/hour=[0-9]{{2}}/"
    rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}{re.escape(SUFFIX)}"
)


def hour_folder(table: Table, hour: int) -> PurePosixPath:
    """Return the folder of an hour, counted since 1970."""
    at = datetime.fromtimestamp(hour * HOUR_NS // _SECOND_NS, timezone.utc)
    return PurePosixPath(table.value, f"day={at:%Y-%m-%d}", f"hour={at:%H}")


def hour_of(path: str) -> int:
    """Return the hour, counted since 1970, of a file of the store.

    Raises ``ValueError`` for another path.
    """
    _, day, hour, _ = PurePosixPath(path).parts
    at = datetime.strptime(f"{day} {hour} +0000", "day=%Y-%m-%d hour=%H %z")
    return round(at.timestamp()) * _SECOND_NS // HOUR_NS


def day_of(path: str) -> int:
    """Return the day, counted since 1970, of a file of the store.

    Raises ``ValueError`` for another path.
    """
    return hour_of(path) * HOUR_NS // DAY_NS


def is_data_path(path: str) -> bool:
    """Check whether ``path`` is a valid path of a data file.

    A valid path has a table, a day, an hour, and a name of plain characters.
    """
    if _DATA_PATH.fullmatch(path) is None:
        return False
    try:
        hour_of(path)
    except ValueError:
        return False
    return True


def link_on_the_way(root: Path, paths: Iterable[str]) -> Path | None:
    """Find the first link below ``root`` that leads to one of ``paths``.

    A store has no links. ``root`` itself may be a link.
    """
    plain: set[Path] = set()
    for path in paths:
        at = root
        for step in PurePosixPath(path).parts:
            at = at / step
            if at not in plain:
                if at.is_symlink():
                    return at
                plain.add(at)
    return None


def files_below(root: Path) -> list[str]:
    """List every data file of a store, listed or not, temporary files included.

    Paths are relative to the store's root. Links are not followed.
    """
    found = (path for table in Table for path in root.glob(f"{table.value}/day=*/hour=*/*{SUFFIX}*"))
    paths = sorted(path.relative_to(root).as_posix() for path in found if path.name.endswith((SUFFIX, f"{SUFFIX}{TEMPORARY}")))
    return [path for path in paths if link_on_the_way(root, [path]) is None]
