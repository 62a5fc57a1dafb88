"""Write the Grafana dashboards as JSON files, which Grafana imports or provisions.

examples:
  handrail dashboards export ./dashboards
  handrail dashboards export ./dashboards --datasource Prometheus
  handrail dashboards export ./dashboards --handrail-url https://handrail:4380
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from handrail.config.types import InvalidValueError, url
from handrail.printable import is_printable
from handrail_cli.errors import EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_dashboards.export import Choices, dashboards, provisioning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail dashboards``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="export")
    export = commands.add_parser("export", help="write the files")
    export.add_argument(
        "folder", metavar="DIR", type=Path, help="folder; created if missing, files of the same names are replaced"
    )
    export.add_argument(
        "--datasource", metavar="NAME", help="Prometheus data source in Grafana (default: you choose it in Grafana)"
    )
    export.add_argument("--tempo", metavar="NAME", help="Tempo data source in Grafana, for links to traces")
    export.add_argument("--jaeger-url", metavar="URL", help="address of Jaeger for a browser, for links to traces")
    export.add_argument("--handrail-url", metavar="URL", help="address of the collector for a browser, for links")
    export.add_argument("--provisioning", action="store_true", help="also write examples for Grafana's provisioning folder")
    export.add_argument("--json", action="store_true", help="print one JSON object: the written files")


def run(arguments: argparse.Namespace) -> int:
    """Return 0; raise ``CliError`` on failure.

    Its exit code is 1 where a file cannot be written, and 2 for a flag that no dashboard could use.
    """
    folder: Path = arguments.folder
    choices = Choices(
        datasource=_name("--datasource", arguments.datasource),
        tempo=_name("--tempo", arguments.tempo),
        jaeger=_address("--jaeger-url", arguments.jaeger_url, "https://jaeger.example.org"),
        handrail=_address("--handrail-url", arguments.handrail_url, "https://handrail.example.org:4380"),
    )
    made = dict(dashboards(choices))
    extra = {f"provisioning/{name}": text for name, text in provisioning().items()} if arguments.provisioning else {}
    for name, text in (made | extra).items():
        _write(folder / name, text)
    boards: list[dict[str, Any]] = [{"file": str(folder / name), **_about(text)} for name, text in made.items()]
    if arguments.json:
        print(json.dumps({"dashboards": boards, "provisioning": [str(folder / name) for name in extra]}))
        return EXIT_OK
    for board in boards:
        print(f"{board['file']}  {board['title']}, {counted(board['panels'], 'panel')}")
    for name in extra:
        print(f"{folder / name}  an example: see its comments")
    return EXIT_OK


def _name(flag: str, text: str | None) -> str:
    """Return the name of a data source; '' without one.

    Only Grafana knows whether it has the data source.
    """
    if text is not None and (text != text.strip() or not text or not is_printable(text)):
        what = f"{flag} is {text!r}: no name of a data source"
        valid = f"the name or uid that Grafana shows under Connections, Data sources; without {flag} you choose it in Grafana"
        raise CliError(what=what, where="command line", valid=valid, exit_code=EXIT_USAGE)
    return text or ""


def _address(flag: str, text: str | None, example: str) -> str:
    if text is None:
        return ""
    try:
        return url(text).rstrip("/")
    except InvalidValueError as error:
        raise CliError(
            what=f"{flag} is {text!r}: {error.rule}",
            where="command line",
            valid=f"an address that a browser can open: {flag} {example}",
            nearest=(error.nearest,) if error.nearest else (),
            exit_code=EXIT_USAGE,
        ) from None


def _about(text: str) -> dict[str, Any]:
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
            valid="a folder with write permission",
        ) from None
