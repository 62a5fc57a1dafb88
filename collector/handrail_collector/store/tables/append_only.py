"""The tables besides requests and spans: which there are, and what publishing and folding ask of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from handrail_collector.store.samples import SAMPLED
from handrail_collector.store.schema import StoreColumn, Table
from handrail_collector.store.tables.dataclass_table import FLAT


class AppendOnlyTable(Protocol):
    """One such table."""

    @property
    def time(self) -> str:
        """The column, and the attribute of a row, that its hours go by."""

    def encode(self, rows: Sequence[Any]) -> pa.Table:
        """Raises ``ValueError`` or ``pa.ArrowInvalid`` for values that no column takes."""

    def columns_of(self, table: pa.Table) -> tuple[StoreColumn, ...]:
        """The columns of a table that ``encode`` made, in its order."""


APPEND_ONLY: Final[Mapping[Table, AppendOnlyTable]] = {**FLAT, **SAMPLED}
"""By table."""
