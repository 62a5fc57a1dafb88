"""Find Prometheus' own tools on this machine.

Without a tool, its tests report this and are skipped.
"""

from __future__ import annotations

import shutil
from typing import Final

import pytest

_INSTALL: Final = "is not installed: apt-get install --no-install-recommends prometheus prometheus-alertmanager"


def _needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} {_INSTALL}")


needs_promtool: Final = _needs("promtool")
needs_amtool: Final = _needs("amtool")
needs_alertmanager: Final = _needs("prometheus-alertmanager")
