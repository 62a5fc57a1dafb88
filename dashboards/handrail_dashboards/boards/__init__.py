"""The five dashboards.

Names of metrics are written out, so that a search finds them; the lint knows which exist.
"""

from __future__ import annotations

from typing import Final

from handrail_dashboards.boards import decode, devices, fleet, handoff, self_monitoring
from handrail_dashboards.panel import Board

BOARDS: Final[tuple[Board, ...]] = (fleet.BOARD, handoff.BOARD, decode.BOARD, devices.BOARD, self_monitoring.BOARD)
