"""Generate docs/configuration.md from the configuration classes.

A test compares the file with this page.
"""

from __future__ import annotations

from handrail.config.schema import reference
from handrail_collector.config import CollectorConfig
from handrail_sidecar.settings import SidecarConfig

_PAGE = """# Configuration

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


def configuration_page() -> str:
    """Return the whole page as Markdown."""
    return _PAGE.format(sidecar=reference(SidecarConfig), collector=reference(CollectorConfig))
