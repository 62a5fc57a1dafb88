"""Check a file of objectives, and make Prometheus alert rules from it.

The check can also ask Prometheus whether it has the series that the rules use.

examples:
  handrail alerts slo > slo.yaml
  handrail alerts check slo.yaml --prometheus http://127.0.0.1:9090
  handrail alerts render --slo slo.yaml --out /etc/prometheus/rules
  handrail alerts render --format prometheusrule | kubectl apply -f -
  handrail alerts alertmanager
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from handrail.config.schema import ConfigError
from handrail.config.types import Duration
from handrail_alerts import groups
from handrail_alerts.alert import RuleGroup
from handrail_alerts.alertmanager import example
from handrail_alerts.bucket_bounds import moved
from handrail_alerts.render import RUNBOOKS, Format, rule_file, rule_object
from handrail_alerts.selector_check import Read, read_selectors
from handrail_alerts.slo import DEFAULT, MOST_SCRAPE_NS, SloFile, load
from handrail_cli.access import PROMETHEUS, access, add_access_flags
from handrail_cli.config_file import invalid_file
from handrail_cli.console import remark
from handrail_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.formatting import counted
from handrail_cli.prometheus import QueryRefusedError, base_of, has_result
from handrail_cli.time_flags import duration_ns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail alerts``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="render|check|slo|alertmanager")
    render = commands.add_parser("render", help="print or write the rules")
    render.add_argument(
        "--slo", metavar="FILE", type=Path, default=DEFAULT, help="file of objectives (default: the one that ships with Handrail)"
    )
    render.add_argument("--out", metavar="DIR", type=Path, help="write one file per group here instead of printing all rules")
    render.add_argument("--runbooks", metavar="URL", default=RUNBOOKS, help=f"address of the runbook pages (default: {RUNBOOKS})")
    render.add_argument(
        "--format",
        choices=[each.value for each in Format],
        default=Format.PROMETHEUS.value,
        help="rule files, or an object for the Prometheus operator",
    )
    render.add_argument("--evaluation-interval", metavar="DURATION", help="interval to use instead of the file's")
    render.add_argument("--scrape-interval", metavar="DURATION", help="interval to use instead of the file's")
    render.add_argument("--json", action="store_true", help="print one JSON object: files, alerts, moved thresholds")
    check = commands.add_parser("check", help="check a file of objectives")
    check.add_argument("file", metavar="FILE", type=Path, help="file of objectives")
    check.add_argument("--prometheus", metavar="URL", help="Prometheus that must have the series that the rules read")
    add_access_flags(check, PROMETHEUS)
    check.add_argument("--json", action="store_true", help="print one JSON object: valid, problems, moved thresholds, unmatched")
    commands.add_parser("slo", help="print the file of objectives that ships with Handrail")
    commands.add_parser("alertmanager", help="print an example configuration of Alertmanager, with its inhibitions")


def run(arguments: argparse.Namespace) -> int:
    """Return 0; 1 for unmatched series; 2 for a file that is not valid.

    Unmatched series are those that rules read and Prometheus does not have.
    """
    if arguments.action == "slo":
        print(DEFAULT.read_text(encoding="utf-8"), end="")
        return EXIT_OK
    if arguments.action == "alertmanager":
        print(example(), end="")
        return EXIT_OK
    return _render(arguments) if arguments.action == "render" else _check(arguments)


# --- render ---------------------------------------------------------------------------------------------------------------


def _render(arguments: argparse.Namespace) -> int:
    slo = _with_intervals(_loaded(arguments.slo), arguments)
    files = groups.files(slo)
    texts = _texts(files, slo, arguments)
    if arguments.out is not None:
        _write(arguments.out, texts)
    if arguments.json:
        alerts = sorted({alert.name for alert in groups.alerts(slo)})
        names = [str(arguments.out / name) if arguments.out else name for name in texts]
        print(json.dumps({"slo": str(arguments.slo), "files": names, "alerts": alerts, "moved": list(moved(slo))}))
    elif arguments.out is not None:
        for name in texts:
            print(arguments.out / name)
    else:
        print("".join(texts.values()), end="")
    _remark_moved(slo)
    if "://" not in arguments.runbooks:
        remark(f"runbook_url is {arguments.runbooks}/NAME.md, which a pager cannot open: give their address, --runbooks URL")
    return EXIT_OK


def _texts(files: Mapping[str, tuple[RuleGroup, ...]], slo: SloFile, arguments: argparse.Namespace) -> dict[str, str]:
    """Return the text of each file by name.

    Printed together, the rules are one document.
    """
    if arguments.format == Format.PROMETHEUSRULE.value:
        return {"prometheusrule.yaml": rule_object(files, slo, arguments.runbooks)}
    if arguments.out is None:
        return {"rules.yaml": rule_file([group for each in files.values() for group in each], slo, arguments.runbooks)}
    return {f"{name}.yaml": rule_file(each, slo, arguments.runbooks) for name, each in files.items()}


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(
            what=f"cannot write the rules: {error.strerror}", where=str(folder), valid="a folder with write permission"
        ) from None


def _with_intervals(slo: SloFile, arguments: argparse.Namespace) -> SloFile:
    prometheus = slo.prometheus
    prometheus = replace(
        prometheus,
        evaluation_interval=_interval("--evaluation-interval", arguments.evaluation_interval, prometheus.evaluation_interval),
        scrape_interval=_interval("--scrape-interval", arguments.scrape_interval, prometheus.scrape_interval, MOST_SCRAPE_NS),
    )
    return replace(slo, prometheus=prometheus)


def _interval(flag: str, text: str | None, otherwise: Duration, most_ns: int | None = None) -> Duration:
    if text is None:
        return otherwise
    interval = Duration(duration_ns(flag, text, example="30s"))
    if interval < 10**9:
        raise CliError(what=f"{flag} {text} is too short", valid="at least 1s", exit_code=EXIT_USAGE)
    if most_ns is not None and interval > most_ns:
        raise CliError(what=f"{flag} {text} is too long", valid=f"at most {most_ns // 10**9}s", exit_code=EXIT_USAGE)
    return interval


def _loaded(file: Path) -> SloFile:
    try:
        return load(file)
    except ConfigError as error:
        raise invalid_file(error, "correct the file; 'handrail alerts slo' prints a valid one") from None


def _remark_moved(slo: SloFile) -> None:
    for each in moved(slo):
        remark(each)


# --- check ----------------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    try:
        slo = load(arguments.file)
    except ConfigError as error:
        if arguments.json:
            print(
                json.dumps({"file": str(arguments.file), "valid": False, "problems": [asdict(each) for each in error.problems]})
            )
        else:
            print(error)
        return EXIT_USAGE
    alerts = groups.alerts(slo)
    missing = _unmatched(slo, arguments) if arguments.prometheus else None
    if arguments.json:
        print(json.dumps(_as_json(arguments, slo, missing)))
    else:
        count = len({alert.name for alert in alerts})
        made = f"{counted(len(slo.objectives), 'objective')}, {counted(count, 'alert')} in {counted(len(alerts), 'rule')}"
        print(f"{arguments.file}: valid; {made}")
        for line in moved(slo):
            print(f"  {line}")
        if missing is not None:
            _print_unmatched(missing, arguments.prometheus)
    return EXIT_FAILED if missing else EXIT_OK


def _unmatched(slo: SloFile, arguments: argparse.Namespace) -> tuple[Read, ...]:
    base = base_of(arguments.prometheus)
    ask = has_result(base, access(arguments, base, PROMETHEUS))
    found = []
    for selector in read_selectors(slo):
        try:
            known = ask(selector.query)
        except QueryRefusedError as error:
            raise CliError(
                what=f"Prometheus refuses a query of the rules: {error}",
                lines=(f"query:   {selector.query}", f"rules:   {', '.join(selector.readers)}"),
                where=base,
                valid=f"a query that Prometheus accepts; prometheus.selector, group_by and the models come from {arguments.file}",
            ) from None
        if not known:
            found.append(selector)
    return tuple(found)


def _as_json(arguments: argparse.Namespace, slo: SloFile, missing: tuple[Read, ...] | None) -> dict[str, Any]:
    return {
        "file": str(arguments.file),
        "valid": True,
        "objectives": [objective.name for objective in slo.objectives],
        "alerts": sorted({alert.name for alert in groups.alerts(slo)}),
        "moved": list(moved(slo)),
        "unmatched": None if missing is None else [asdict(each) for each in missing],
    }


def _print_unmatched(missing: tuple[Read, ...], prometheus: str) -> None:
    if not missing:
        print(f"{prometheus} has every series that the rules read")
        return
    matches = "selector matches" if len(missing) == 1 else "selectors match"
    print(f"{len(missing)} {matches} no series that {prometheus} scraped in the last hour:")
    for each in missing:
        print(f"  {each.selector}\n    {', '.join(each.readers)}")
    print("These rules cannot fire: the feature is off, nothing is scraped, or prometheus.selector in the file is wrong.")
