"""Write ``generated`` from the boards: ``python -m handrail_dashboards``.

Needs ``grafana-foundation-sdk``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from handrail_dashboards.boards import BOARDS
from handrail_dashboards.build import board_json

GENERATED: Final = Path(__file__).parent / "generated"


def write() -> None:
    """Write all dashboards, and remove every other file there."""
    made = {f"{board.file}.json": board_json(board) for board in BOARDS}
    GENERATED.mkdir(exist_ok=True)
    for stale in {each.name for each in GENERATED.glob("*.json")} - made.keys():
        (GENERATED / stale).unlink()
    for name, text in made.items():
        (GENERATED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
