"""One GET, as tests of running processes need it."""

from __future__ import annotations

import contextlib
import urllib.request


def get(url: str) -> str:
    """The answer's body. Raises ``OSError`` where there is none, or no good one."""
    with urllib.request.urlopen(url, timeout=30) as response:
        text: str = response.read().decode()
        return text


def succeeds(url: str) -> bool:
    """Whether it answers, and with no error."""
    with contextlib.suppress(OSError):
        get(url)
        return True
    return False
