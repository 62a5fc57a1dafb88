"""Remove rows that a later version replaces or withdraws from their files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from handrail_collector.store import compaction
from handrail_collector.store.layout import hour_of
from handrail_collector.store.manifest import StoredFile
from handrail_collector.store.partitions import PartitionFile
from handrail_collector.store.publish import StorePublisher
from handrail_collector.store.quarantine import DamagedFiles
from handrail_collector.store.read import VERSION_MARGIN_NS
from handrail_collector.store.schema import StoreColumn, Table


class ReplacedRows:
    """Remove replaced rows, in the one thread that folds and retires."""

    def __init__(self, publisher: StorePublisher, damaged: DamagedFiles) -> None:
        self._publisher = publisher
        self._damaged = damaged

    def drop(self, file: StoredFile, later: dict[bytes, dict[bytes, int]]) -> int:
        """Rewrite ``file`` without the rows that ``later`` replaces.

        ``later``: the result of ``compaction.superseding``. Returns how many rows went.
        A file that cannot be read stays as it is.
        """
        keys = self._damaged.read(file, compaction.KEYS)
        if keys is None or len(compaction.without(keys, later)) == len(keys):
            return 0
        table = self._damaged.read(file)
        if table is None:
            return 0
        table, columns = compaction.fold_requests([compaction.without(table, later)], keys[:0], all_known=False)
        first, end = next((p.first_offset, p.end_offset) for p in self._publisher.publishes() if file in p.files)
        self.put(file.table, hour_of(file.path), table, columns, [file], first, end)
        return file.rows - int(table.num_rows)

    def put(
        self,
        name: Table,
        hour: int,
        table: pa.Table,
        columns: tuple[StoreColumn, ...],
        files: Sequence[StoredFile],
        first_offset: int,
        end_offset: int,
    ) -> None:
        """Replace ``files`` by a file with the rows of ``table``.

        An empty ``table`` adds no file.
        """
        gone = {file.path for file in files}
        if table.num_rows:
            part = PartitionFile(name, hour, table, columns, max(file.written_unix_ns for file in files))
            self._publisher.replace(gone, part, first_offset, end_offset)
        else:
            self._publisher.retire(gone)


def near(files: Iterable[StoredFile], others: Sequence[StoredFile]) -> list[StoredFile]:
    """Select those of ``files`` that may hold another version of a row in ``others``."""
    first = min((file.min_unix_ns for file in others), default=0) - VERSION_MARGIN_NS
    last = max((file.max_unix_ns for file in others), default=0) + VERSION_MARGIN_NS
    return [file for file in files if file.max_unix_ns >= first and file.min_unix_ns <= last] if others else []
