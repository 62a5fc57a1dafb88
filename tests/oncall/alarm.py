"""Run one Prometheus, one Alertmanager and a pager, as a site has them.

Prometheus has the rules that ship, Alertmanager the inhibitions that ship. The pager is a webhook receiver that records each
notification and its time.
Fleets come and go as scrape targets, each with its own label ``cluster``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from handrail_cli.subprocesses import HOST, Children, free_ports

SHIPPED: Final = Path(__file__).parents[2] / "alerts" / "alertmanager.yaml"
_PAGER: Final = "http://127.0.0.1:9095"  # path in the shipped example
_START_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Notification:
    """One alert as the pager got it; ``received_unix_s`` is the time of receipt."""

    received_unix_s: float
    receiver: str
    resolved: bool
    labels: Mapping[str, str]
    summary: str

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")

    @property
    def cluster(self) -> str:
        return self.labels.get("cluster", "")

    @property
    def pages(self) -> bool:
        return self.labels.get("severity") == "page"


def read_notification(body: bytes, receiver: str, received_unix_s: float) -> list[Notification]:
    """Parse the alerts from a webhook's body (Alertmanager's version 4).

    Raises ``ValueError`` for anything else.
    """
    found = json.loads(body)
    if not isinstance(found, dict) or not isinstance(found.get("alerts"), list):
        raise ValueError("no notification of Alertmanager: no list of alerts in it")
    return [
        Notification(
            received_unix_s,
            receiver,
            alert.get("status") == "resolved",
            dict(alert.get("labels", {})),
            str(alert.get("annotations", {}).get("summary", "")),
        )
        for alert in found["alerts"]
    ]


class Pager:
    """Receives notifications on a free port while it is open.

    ``notifications``: all of them, in order of receipt.
    """

    def __init__(self, file: Path) -> None:
        self.notifications: list[Notification] = []
        pager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                received = read_notification(body, self.path.strip("/"), time.time())
                pager.notifications += received
                with file.open("a", encoding="utf-8") as out:
                    for each in received:
                        line = {"received_unix_s": each.received_unix_s, "receiver": each.receiver, "resolved": each.resolved}
                        out.write(json.dumps({**line, "labels": each.labels, "summary": each.summary}) + "\n")
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Write nothing to the log."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.address = f"{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="pager", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Rule:
    """One alerting rule as Prometheus has it; ``wait_s`` is its ``for``."""

    name: str
    expr: str
    wait_s: float
    labels: Mapping[str, str]


class Alarm:
    """The running programs; ``folder`` holds their files."""

    def __init__(self, folder: Path, prometheus: str, pager: Pager) -> None:
        self.prometheus = prometheus
        self.pager = pager
        self._targets = folder / "targets"
        self._targets.mkdir(exist_ok=True)

    def watch(self, cluster: str, sidecars: Sequence[str], collector: str) -> None:
        """Scrape a fleet from now on, or other addresses of it."""
        for job, addresses in (("sidecar", list(sidecars)), ("collector", [collector])):
            file = self._targets / f"{job}-{cluster}.json"
            draft = file.with_suffix(".tmp")
            draft.write_text(json.dumps([{"targets": addresses, "labels": {"cluster": cluster}}]), encoding="utf-8")
            draft.replace(file)

    def forget(self, cluster: str) -> None:
        """Stop scraping a fleet: its series end, and so do its alerts."""
        for job in ("sidecar", "collector"):
            (self._targets / f"{job}-{cluster}.json").unlink(missing_ok=True)

    def scraped(self, cluster: str) -> int:
        """Return how many targets of the fleet have answered."""
        found = self.ask(f'count(up{{cluster="{cluster}"}} == 1)')
        return int(float(found[0]["value"][1])) if found else 0

    def ask(self, query: str, at_unix_s: float | None = None) -> list[dict[str, Any]]:
        """Return the answer to an instant query."""
        requested_query = {"query": query, **({} if at_unix_s is None else {"time": f"{at_unix_s:.3f}"})}
        found: list[dict[str, Any]] = self._get("query", requested_query)["result"]
        return found

    def ask_range(self, query: str, since_unix_s: float, until_unix_s: float, step_s: float) -> list[dict[str, Any]]:
        """Return the answer to a range query; at most 11,000 steps."""
        requested_query = {"query": query, "start": f"{since_unix_s:.3f}", "end": f"{until_unix_s:.3f}", "step": f"{step_s:g}"}
        found: list[dict[str, Any]] = self._get("query_range", requested_query)["result"]
        return found

    def rules(self) -> tuple[Rule, ...]:
        """Return all loaded alerting rules."""
        groups = self._get("rules", {"type": "alert"})["groups"]
        every = (rule for group in groups for rule in group["rules"])
        return tuple(Rule(rule["name"], rule["query"], float(rule["duration"]), rule["labels"]) for rule in every)

    def _get(self, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]


@contextmanager
def alarm(folder: Path, slo: Path, interval_s: int) -> Iterator[Alarm]:
    """Run the alarm while the context is entered.

    Raises ``FileNotFoundError`` when the programs are missing, ``ChildError`` when one does not start.
    """
    programs = {name: _program(name) for name in ("prometheus", "prometheus-alertmanager")}
    children, pager = Children(folder), Pager(folder / "notifications.jsonl")
    try:
        rules = folder / "rules"
        every = ("--evaluation-interval", f"{interval_s}s", "--scrape-interval", f"{interval_s}s")
        render = [sys.executable, "-m", "handrail_cli.main", "alerts", "render", "--slo", str(slo), "--out", str(rules), *every]
        subprocess.run(render, check=True, stdout=subprocess.DEVNULL)
        paging, scraping = (f"{HOST}:{port}" for port in free_ports(2))
        _alertmanager(children, folder, programs["prometheus-alertmanager"], paging, pager)
        _prometheus(children, folder, programs["prometheus"], scraping, paging, interval_s)
        for address in (paging, scraping):
            children.wait_for(f"{address} is not ready", lambda address=address: _answers(address), _START_S)  # type: ignore[misc]
        yield Alarm(folder, f"http://{scraping}", pager)
    finally:
        children.end([], 10.0)
        pager.close()


def _alertmanager(children: Children, folder: Path, program: str, address: str, pager: Pager) -> None:
    """Write the shipped file with another pager's address."""
    shipped = SHIPPED.read_text(encoding="utf-8")
    if _PAGER not in shipped:
        raise ValueError(f"{SHIPPED} names no receiver at {_PAGER}")
    (file := folder / "alertmanager.yml").write_text(shipped.replace(_PAGER, f"http://{pager.address}"), encoding="utf-8")
    where = (f"--config.file={file}", f"--storage.path={folder / 'alertmanager'}", f"--web.listen-address={address}")
    children.start("alertmanager", [program, *where, "--cluster.listen-address="])


def _prometheus(children: Children, folder: Path, program: str, address: str, paging: str, interval_s: int) -> None:
    targets = folder / "targets"
    targets.mkdir()
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [str(folder / "rules" / "*.yaml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [paging]}]}]},
        "scrape_configs": [
            {
                "job_name": f"handrail-{job}",
                "file_sd_configs": [{"files": [str(targets / f"{job}-*.json")], "refresh_interval": "5s"}],
            }
            for job in ("sidecar", "collector")
        ],
    }
    (file := folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    where = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    children.start("prometheus", [program, *where, "--enable-feature=exemplar-storage"])


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name.removeprefix("prometheus-"))
    if found is None:
        raise FileNotFoundError(f"{name}: apt-get install prometheus prometheus-alertmanager")
    return found


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
