"""One GET, for tests of running processes."""

from __future__ import annotations

import contextlib
import urllib.request


def get(url: str) -> str:
    """Return the answer's body.

    Raises ``OSError`` when there is no answer, or an error status.
    """
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
        return text


def succeeds(url: str) -> bool:
    """Return whether the address answers without an error."""
    with contextlib.suppress(OSError):
        get(url)
        return True
    return False
