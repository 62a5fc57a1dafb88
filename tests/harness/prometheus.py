"""A real Prometheus over series that a test writes, so a query's answer is known.

Nothing is scraped and no test waits.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from handrail_cli.subprocesses import HOST, Children, free_ports
from harness.skips import skip_missing

BEGAN_S: Final = 1_700_000_000
STEP_S: Final = 15
STEPS: Final = 9
ENDED_S: Final = BEGAN_S + (STEPS - 1) * STEP_S
WINDOW_S: Final = 60
ONE_AT_THE_END: Final = 1 / (ENDED_S - BEGAN_S)
"""Growth per second of a series whose value is 1 at the end, for use as a gauge."""

BORN: Final = STEPS - 3
"""The step at which a ``born`` series begins: within the last minute."""

Series = tuple[str, Mapping[str, str], float]
"""Name, labels, growth per second from 0 on."""


class Written:
    """A running Prometheus and its address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return labels -> value at the end of the data.

        ``$__rate_interval`` and ``$__range`` are a minute; all other variables are "all".
        """
        for variable, value in {"$__rate_interval": f"{WINDOW_S}s", "$__range": f"{WINDOW_S}s"}.items():
            query = query.replace(variable, value)
        for variable in ("cluster", "model", "role", "instance"):
            query = query.replace(f"${variable}", ".*")
        requested_query = urllib.parse.urlencode({"query": query, "time": ENDED_S})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query?{requested_query}", timeout=60) as response:
            found: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in found}


@contextlib.contextmanager
def written(folder: Path, series: Sequence[Series], born: Sequence[Series] = ()) -> Iterator[Written]:
    """Run Prometheus with counters that grow evenly.

    ``born`` series begin within the last minute; their number is a constant value instead of a growth.
    Skips where there is no Prometheus.
    """
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus is None or promtool is None:
        skip_missing("prometheus and promtool: make setup installs them or says how")
    (page := folder / "page.txt").write_text(_page(series, born), encoding="utf-8")
    command = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(page), str(folder / "tsdb")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (config := folder / "prometheus.yml").write_text("{}\n", encoding="utf-8")
    children = Children(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(children.end, [], 10.0)
        (port,) = free_ports(1)
        where = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={HOST}:{port}")
        children.start("prometheus", [prometheus, *where, "--storage.tsdb.retention.time=100y"])
        children.wait_for("prometheus is not ready", lambda: _ready(f"{HOST}:{port}"), 60)
        yield Written(f"{HOST}:{port}")


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _page(series: Sequence[Series], born: Sequence[Series]) -> str:
    """Write OpenMetrics with timestamps.

    Samples of one family are adjacent, those of one series in order of time.
    """
    reports = [(name, labels, [(step, growth * step * STEP_S) for step in range(STEPS)]) for name, labels, growth in series]
    reports += [(name, labels, [(step, value) for step in range(BORN, STEPS)]) for name, labels, value in born]
    lines = []
    for name, labels, samples in sorted(reports, key=lambda each: each[0]):
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        lines += [f"{name}{{{text}}} {value} {BEGAN_S + step * STEP_S}" for step, value in samples]
    return "\n".join([*lines, "# EOF\n"])
