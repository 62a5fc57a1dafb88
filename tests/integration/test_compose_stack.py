"""The Compose file's emulated fleet without containers.

Each service runs its own command line, with a loopback address of its own in place of its name.
The test does not cover what a container adds. It covers that the parts find each other by these ports and flags.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from handrail_cli.subprocesses import Children
from harness.manifests import COMPOSE, compose
from harness.web import get, succeeds

pytestmark = pytest.mark.timeout(600)

REQUESTS = 12
DEADLINE_S = 180.0
_PROGRAMS = {
    (): (sys.executable, "-m", "handrail_cli.main"),  # the images' own entry point
    ("python", "-m", "handrail_sim.emulator"): (sys.executable, "-m", "handrail_sim.emulator"),
}


class Stack:
    """Addresses, folders and processes of the services."""

    def __init__(self, folder: Path, children: Children) -> None:
        self.services: dict[str, dict[str, Any]] = compose("emulated")["services"]
        network = f"127.{random.randint(2, 250)}.{random.randint(0, 250)}"  # several test runs at once
        names = [name for name, each in self.services.items() if "network_mode" not in each]
        self.at = {name: f"{network}.{number}" for number, name in enumerate(names, start=1)}
        self._folder = folder
        self._children = children

    def here(self, service: str) -> str:
        mode = str(self.services[service].get("network_mode", ""))
        return self.at[mode.removeprefix("service:") or service]

    def words(self, service: str) -> list[str]:
        """Return a service's command line, with addresses for names and its own folder."""
        return [self.moved(service, str(word)) for word in self.services[service]["command"]]

    def moved(self, service: str, text: str) -> str:
        for own in ("0.0.0.0", "127.0.0.1"):
            text = text.replace(own, self.here(service))
        names = "|".join(sorted(map(re.escape, self.at), key=len, reverse=True))
        text = re.sub(rf"(?<![\w-])({names})(?=:\d)", lambda found: self.at[found[1]], text)
        return text.replace("/var/lib/handrail", str(self._folder / service))

    def start(self, service: str, *, may_end: bool = False) -> None:
        entry = tuple(self.services[service].get("entrypoint", ()))
        (self._folder / service).mkdir()
        command = [*_PROGRAMS[entry], *self.words(service)]
        self._children.start(service, command, self.services[service].get("environment"), may_end=may_end)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[tuple[Stack, Callable[[str, Callable[[], bool]], None]]]:
    children = Children(tmp_path)
    made = Stack(tmp_path, children)
    config = made.moved("collector", (COMPOSE / "collector.yaml").read_text(encoding="utf-8"))
    file = tmp_path / "collector.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(config), "forward": []}), encoding="utf-8")
    made.services["collector"]["command"] = ["collector", f"--config={file}", "--decision-engine-wait=3s", "--flush-interval=1s"]
    without = ("load", "pager")  # the test starts the load itself; Alertmanager is not here
    started = [
        name for name, each in made.services.items() if str(each.get("image")).startswith("handrail") and name not in without
    ]

    def wait(what: str, done: Callable[[], bool]) -> None:
        children.wait_for(what, done, DEADLINE_S, poll_s=0.2)

    try:
        for name in started:
            made.start(name)
        yield made, wait
    finally:
        children.end([], 10.0)


def test_the_services_find_each_other(stack: tuple[Stack, Callable[[str, Callable[[], bool]], None]]) -> None:
    made, wait = stack
    (group,) = yaml.safe_load((COMPOSE / "targets/emulated.yml").read_text(encoding="utf-8"))
    pages = {target: f"http://{made.moved('prometheus', target)}" for target in group["targets"]}
    for target, url in pages.items():
        wait(f"the sidecar {target} is not ready", partial(succeeds, f"{url}/readyz"))
    api = f"http://{made.here('collector')}:4380"
    wait("the collector is not ready", lambda: succeeds(f"{api}/readyz"))
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        wait(f"{name} is not up", partial(succeeds, f"http://{made.here(name)}:8000/health"))
    (line,) = made.services["load"]["command"]
    load = made.moved("load", line).replace("$(date +%s)", "7").split("> /dev/null")[0].split()[4:]
    load[load.index("--requests") + 1], load[load.index("--rate") + 1] = str(REQUESTS), "4"
    made.services["load"] |= {"entrypoint": ["python", "-m", "handrail_sim.emulator"], "command": load}
    made.start("load", may_end=True)

    def joined() -> bool:
        rows = json.loads(get(f"{api}/api/v1/requests?limit=100"))["requests"]
        return sum(complete(row) for row in rows) >= REQUESTS

    wait("the requests were not joined", joined)
    for target, url in pages.items():
        page = get(f"{url}/metrics")
        assert "handrail_sidecar_export_up 1.0" in page, f"{target} does not reach the collector"


def complete(row: Mapping[str, Any]) -> bool:
    """Return whether a request is decided with both engines on its path.

    The engines' own spans must be there beside what the proxies saw.
    """
    reports = {phase["source"] for phase in row["phases"]}
    both = bool(row["prefill_instance"] and row["decode_instance"])
    return both and "otlp" in reports and "proxy+otlp" in reports and not row.get("provisional")
