"""Bounded values of the label ``model_name``.

The bound is needed because a client may write anything as its model. A name becomes a label once a process has answered under it,
or an engine's metrics page shows it. Any other requested name is ``unknown``; names beyond the bound are ``other``.
"""

from __future__ import annotations

from typing import Final

from handrail.printable import printable

MOST_MODELS: Final = 32
UNKNOWN: Final = "unknown"
OTHER: Final = "other"
_LONGEST: Final = 128


class ModelLabels:
    """Names that are labels, in the order in which they became one."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def serve(self, name: str | None) -> str:
        """Label of a model that answers."""
        if not name:
            return UNKNOWN
        name = printable(name[:_LONGEST])
        if name not in self.names:
            if len(self.names) >= MOST_MODELS:
                return OTHER
            self.names[name] = None
        return name

    def ask(self, name: str | None) -> str:
        """Label of a requested model that may not be served."""
        name = printable(name[:_LONGEST]) if name else UNKNOWN
        return name if name in self.names else UNKNOWN

    def only(self) -> str | None:
        """The one model that is served here; None for several, or none yet."""
        return next(iter(self.names)) if len(self.names) == 1 else None
