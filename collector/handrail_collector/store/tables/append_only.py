"""List the tables besides requests and spans, and define what they have in common.

Publishing and folding use this contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from handrail_collector.store.samples import SAMPLED
from handrail_collector.store.schema import StoreColumn, Table
from handrail_collector.store.tables.dataclass_table import FLAT


class AppendOnlyTable(Protocol):
    """A table besides requests and spans."""

    @property
    def time(self) -> str:
        """The column, and the attribute of a row, that decides its hour."""

    def encode(self, rows: Sequence[Any]) -> pa.Table:
        """Encode rows as a table.

        Raises ``ValueError`` or ``pa.ArrowInvalid`` for values that no column accepts.
        """

    def columns_of(self, table: pa.Table) -> tuple[StoreColumn, ...]:
        """Return the columns of a table that ``encode`` made, in its order."""


APPEND_ONLY: Final[Mapping[Table, AppendOnlyTable]] = {**FLAT, **SAMPLED}
"""Append-only tables by name."""
