"""Check a configuration file.

It prints every problem at once, or the effective configuration with secrets
masked.

example:
  handrail config check decode.yaml
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from handrail.config.schema import ConfigError, keys, load, plain, reference, to_yaml
from handrail_cli.errors import EXIT_OK, EXIT_USAGE
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import SidecarConfig

KINDS: Final[dict[str, type]] = {"sidecar": SidecarConfig, "collector": CollectorConfig}

_PAGE: Final = """# Configuration

The configuration classes generate this page. `pytest tests/collector/cli --update` rewrites it.

Write a key into a YAML file (`--config FILE`) or give it as a flag; the flag wins. A key with a dot is inside its section:
`collector.endpoint` is `collector: {{endpoint: ...}}`. `off`, `none` or nothing unsets an optional key. Handrail refuses
unknown keys. For a list or a set of names, repeat the flag: `--forward URL --forward URL`, `--collector-header NAME=VALUE`.

`handrail config check FILE` shows every problem at once, or the effective configuration with secrets as `****`.

| type | written |
|---|---|
| duration | a number with a unit of ns, us, ms, s, m, h or d: `500ms`, `30s`, `1h30m` |
| size | a number with a unit of B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (of 1000): `64MiB` |
| host:port | `127.0.0.1:4317`, `[::1]:4317`; port 0 lets the system choose |
| URL | scheme, host and port; never a user or password |

## Sidecar

{sidecar}
## Collector

{collector}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail config``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="check")
    check = commands.add_parser("check", help="check a file")
    check.add_argument("file", metavar="FILE", type=Path, help="YAML file")
    check.add_argument("--kind", choices=sorted(KINDS), help="process that the file configures (default: by its keys)")
    check.add_argument("--json", action="store_true", help="print one JSON object: valid, kind, problems or configuration")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when valid, 2 when not."""
    file: Path = arguments.file
    kind = arguments.kind or guess_kind(file)
    try:
        config: Any = load(KINDS[kind], file)
    except ConfigError as error:
        if arguments.json:
            problems = [asdict(problem) for problem in error.problems]
            print(json.dumps({"file": str(file), "kind": kind, "valid": False, "problems": problems}))
        else:
            print(f"{error}\n(checked as a {kind} configuration{'' if arguments.kind else '; --kind chooses another'})")
        return EXIT_USAGE
    if arguments.json:
        print(json.dumps({"file": str(file), "kind": kind, "valid": True, "effective": plain(config)}))
    else:
        print(f"# {file}: a valid {kind} configuration; effective values:")
        print(to_yaml(config), end="")
    return EXIT_OK


def guess_kind(file: Path) -> str:
    """Return the kind whose own top-level keys the file uses more of.

    It is a sidecar where nothing shows the kind (or nothing can be read).
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return "sidecar"
    used = {line.partition(":")[0] for line in lines if line[:1].isalpha()}
    own = {kind: {key.path.partition(".")[0] for key in keys(cls)} for kind, cls in KINDS.items()}
    return (
        "collector"
        if len(used & (own["collector"] - own["sidecar"])) > len(used & (own["sidecar"] - own["collector"]))
        else "sidecar"
    )


def configuration_page() -> str:
    """Return docs/configuration.md, which a test compares with it."""
    return _PAGE.format(sidecar=reference(SidecarConfig), collector=reference(CollectorConfig))
