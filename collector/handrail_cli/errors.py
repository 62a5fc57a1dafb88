"""Define the errors and the exit codes of commands.

An error says what went wrong, where, what would be valid, and the nearest known names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from handrail.printable import printable

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1  # not found, not reachable, failed
EXIT_USAGE: Final = 2  # the command line or the configuration is wrong
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
EXIT_PIPE: Final = 141  # 128 + SIGPIPE: the reader closed the pipe


@dataclass(kw_only=True, eq=False)  # an exception is hashed by identity
class CliError(Exception):
    """A command cannot answer.

    It is shown on standard error, as text or (with ``--json``) as one JSON object.
    """

    what: str
    lines: tuple[str, ...] = ()  # parts of ``what``, each shown on its own line: problems of a file, the end of a log
    where: str = ""
    valid: str = ""
    nearest: tuple[str, ...] = ()
    exit_code: int = EXIT_FAILED

    def __str__(self) -> str:
        lines = [printable(self.what), *(f"  {printable(line)}" for line in self.lines)]
        if self.where:
            lines.append(f"  where:   {printable(self.where)}")
        if self.valid:
            lines.append(f"  valid:   {printable(self.valid)}")
        if self.nearest:
            lines.append(f"  nearest: {printable(', '.join(self.nearest))}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the error in the shape of the HTTP API, plus ``lines`` if there are any."""
        lines = {"lines": list(self.lines)} if self.lines else {}
        return {"what": self.what, **lines, "where": self.where, "valid": self.valid, "nearest": list(self.nearest)}
