"""Export the generated dashboards from the installed package.

A user may set a data source, and where traces are.
Files in ``generated`` are made by ``make dashboards`` and kept in the repository, so nothing is built on a user's machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

PACKAGE: Final = "handrail_dashboards"


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's settings; an empty one leaves the dashboards as generated.

    ``datasource`` and ``tempo`` are names (or uids) of Grafana's data sources, the others are addresses.
    """

    datasource: str = ""
    tempo: str = ""
    jaeger: str = ""
    handrail: str = ""


def dashboards(choices: Choices) -> Mapping[str, str]:
    """Return file names and their JSON, sorted by name."""
    return {
        name: json.dumps(_chosen(json.loads(text), choices), indent=2, ensure_ascii=False) + "\n"
        for name, text in _texts("generated")
    }


def provisioning() -> Mapping[str, str]:
    """Return examples of provisioning files.

    Each has its path below Grafana's provisioning folder.
    """
    return {f"{name.partition('.')[0]}/handrail.yaml": text for name, text in _texts("provisioning")}


def _texts(folder: str) -> list[tuple[str, str]]:
    files = [each for each in (resources.files(PACKAGE) / folder).iterdir() if each.name.endswith((".json", ".yaml"))]
    return sorted((each.name, each.read_text(encoding="utf-8")) for each in files)


def _chosen(board: dict[str, Any], choices: Choices) -> dict[str, Any]:
    for variable in board["templating"]["list"]:
        value = getattr(choices, variable["name"], "")
        if not value:
            continue
        variable["current"] = {"selected": True, "text": value, "value": value}
        if variable["type"] == "datasource":
            variable["regex"] = f"/^{re.escape(value)}$/"  # only this data source can be chosen: another has none of these series
        else:
            variable["query"] = value
    return board
