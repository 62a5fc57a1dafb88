"""Which model names become label values: a bounded set, and none that only a client has made up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from handrail.records import Outcome
from handrail_collector.rows import RequestRow

MOST: Final = 32
OTHER: Final = "other"
UNANSWERED: Final = frozenset({Outcome.HTTP_ERROR.value, Outcome.UPSTREAM_UNREACHABLE.value})
"""No model answered: its name is the client's alone, and whether it got past the router is not known."""

_MOST_CHARS: Final = 200


class Models:
    """Names by first use. ``known``: those that are label values already, whatever the bound."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = {name for name in known if name not in ("", OTHER)}

    @property
    def known(self) -> frozenset[str]:
        """Names that are label values, in no order."""
        return frozenset(self._known)

    def label(self, row: RequestRow) -> str:
        """The label value for ``row``'s model; '' where no model is known.

        A name gets a place of its own when a request for it was answered: a client that tries names gets 404s and takes none.
        """
        name = row.model
        if not name:
            return ""
        if name in self._known:
            return name
        if len(self._known) >= MOST or row.outcome in UNANSWERED or len(name) > _MOST_CHARS or not name.isprintable():
            return OTHER
        self._known.add(name)
        return name
