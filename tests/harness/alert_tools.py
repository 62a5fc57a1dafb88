"""Find Prometheus' own tools on this machine.

Without a tool, its tests report this and are skipped.
"""

from __future__ import annotations

from typing import Final

from harness.skips import needs_program

needs_prometheus: Final = needs_program("prometheus")
needs_promtool: Final = needs_program("promtool")
needs_amtool: Final = needs_program("amtool")
needs_alertmanager: Final = needs_program("prometheus-alertmanager")
