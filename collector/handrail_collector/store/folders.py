"""Where the rows of an hour lie: ``<table>/day=YYYY-MM-DD/hour=HH`` below the store's root, UTC."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path, PurePosixPath

from handrail_collector.store.durable import TEMPORARY
from handrail_collector.store.schema import Table

SUFFIX = ".parquet"

HOUR_NS = 3_600_000_000_000
DAY_NS = 24 * HOUR_NS
_SECOND_NS = 1_000_000_000


def hour_folder(table: Table, hour: int) -> PurePosixPath:
    """The folder of an hour, counted since 1970."""
    at = datetime.fromtimestamp(hour * HOUR_NS // _SECOND_NS, timezone.utc)
    return PurePosixPath(table.value, f"day={at:%Y-%m-%d}", f"hour={at:%H}")


def hour_of(path: str) -> int:
    """The hour, counted since 1970, that a file of the store lies in. Raises ``ValueError`` for another path."""
    _, day, hour, _ = PurePosixPath(path).parts
    at = datetime.strptime(f"{day} {hour} +0000", "day=%Y-%m-%d hour=%H %z")
    return round(at.timestamp()) * _SECOND_NS // HOUR_NS


def day_of(path: str) -> int:
    """The day, counted since 1970, that a file of the store lies in. Raises ``ValueError`` for another path."""
    return hour_of(path) * HOUR_NS // DAY_NS


def files_below(root: Path) -> list[str]:
    """Every data file of a store, listed or not, temporary ones included; paths below its root."""
    found = (path for table in Table for path in root.glob(f"{table.value}/day=*/hour=*/*{SUFFIX}*"))
    return sorted(path.relative_to(root).as_posix() for path in found if path.name.endswith((SUFFIX, f"{SUFFIX}{TEMPORARY}")))
