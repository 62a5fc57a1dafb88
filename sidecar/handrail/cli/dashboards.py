"""Write the Grafana dashboards as JSON files, to import, to provision or to mount. Needs no clone and no Grafana.

examples:
  handrail dashboards export ./dashboards
  handrail dashboards export /var/lib/grafana/dashboards/handrail --datasource Prometheus --handrail-url https://handrail.internal:4380
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from handrail.cli.failure import EXIT_OK, CliError
from handrail_dashboards.export import Choices, dashboards, provisioning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``handrail dashboards``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="export")
    export = commands.add_parser("export", help="write the files")
    export.add_argument("folder", metavar="DIR", type=Path, help="made where it is missing; files of the same names are replaced")
    export.add_argument(
        "--datasource", metavar="NAME", default="", help="Grafana's Prometheus data source (default: chosen in Grafana)"
    )
    export.add_argument("--tempo", metavar="NAME", default="", help="Grafana's Tempo data source, for links")
    export.add_argument("--jaeger-url", metavar="URL", default="", help="Jaeger as a browser reaches it, for links")
    export.add_argument("--handrail-url", metavar="URL", default="", help="the collector as a browser reaches it, for links")
    export.add_argument("--provisioning", action="store_true", help="examples for Grafana's provisioning folder as well")
    export.add_argument("--json", action="store_true", help="one JSON object: what was written")


def run(arguments: argparse.Namespace) -> int:
    """0, or ``CliError`` (1) where a file cannot be written."""
    folder: Path = arguments.folder
    choices = Choices(
        datasource=arguments.datasource,
        tempo=arguments.tempo,
        jaeger=arguments.jaeger_url.rstrip("/"),
        handrail=arguments.handrail_url.rstrip("/"),
    )
    made = dict(dashboards(choices))
    extra = {f"provisioning/{name}": text for name, text in provisioning().items()} if arguments.provisioning else {}
    for name, text in (made | extra).items():
        _write(folder / name, text)
    boards = [{"file": str(folder / name), **_about(text)} for name, text in made.items()]
    if arguments.json:
        print(json.dumps({"dashboards": boards, "provisioning": [str(folder / name) for name in extra]}))
        return EXIT_OK
    for board in boards:
        print(f"{board['file']}  {board['title']}, {board['panels']} panels")
    for name in extra:
        print(f"{folder / name}  an example: see its comments")
    return EXIT_OK


def _about(text: str) -> dict[str, object]:
    board = json.loads(text)
    return {"title": board["title"], "panels": sum(panel["type"] != "row" for panel in board["panels"])}


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(
            what=f"cannot write: {error.strerror}",
            where=str(file),
            valid="a folder that exists or can be made, and may be written to",
        ) from None
