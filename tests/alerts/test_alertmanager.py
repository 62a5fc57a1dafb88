"""The example configuration of Alertmanager, read by amtool and Alertmanager."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from handrail_alerts.alertmanager import example
from handrail_alerts.groups import alerts
from handrail_alerts.slo import load
from harness.alert_tools import needs_alertmanager, needs_amtool
from harness.ports import held_port

FILE = Path(__file__).parents[2] / "alerts/alertmanager.yaml"
SEVERITY = {alert.name: alert.severity.value for alert in alerts(load())}


def test_the_example_is_what_the_inhibitions_make(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update"):
        FILE.write_text(example(), encoding="utf-8")
    assert FILE.read_text("utf-8") == example(), "run this test with --update and review the diff"


@needs_amtool
def test_amtool_takes_it() -> None:
    done = subprocess.run(["amtool", "check-config", str(FILE)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_amtool
@pytest.mark.parametrize(("severity", "receiver"), [("page", "pager"), ("ticket", "tickets")])
def test_a_page_goes_to_the_pager_and_a_ticket_does_not(severity: str, receiver: str) -> None:
    command = ["amtool", "config", "routes", "test", f"--config.file={FILE}", f"severity={severity}", "alertname=KvFetchFailed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip() == receiver


@pytest.fixture
async def alertmanager(tmp_path: Path) -> AsyncIterator[str]:
    """Yield the URL of a real Alertmanager with the example's configuration."""
    held = contextlib.ExitStack()
    address = f"127.0.0.1:{held.enter_context(held_port())}"
    process = await asyncio.create_subprocess_exec(
        "prometheus-alertmanager",
        f"--config.file={FILE}",
        f"--storage.path={tmp_path}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _until(lambda session: _is_ready(session, address))
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()
        held.close()


async def _until(done: Callable[[aiohttp.ClientSession], Awaitable[bool]]) -> None:
    """Ask until the condition holds; the test's own time limit ends it."""
    async with aiohttp.ClientSession() as session:
        while not await done(session):  # noqa: ASYNC110 - another process cannot set an event here
            await asyncio.sleep(0.02)


async def _is_ready(session: aiohttp.ClientSession, address: str) -> bool:
    try:
        async with session.get(f"http://{address}/-/ready") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


D0 = {"cluster": "eu", "job": "handrail", "instance": "d0:9464"}
P0 = {"cluster": "eu", "job": "handrail", "instance": "p0:9464"}
TTFT = {"cluster": "eu", "slo": "ttft-edge", "model_name": "llama", "role": "edge"}


def fired(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return an alert as Prometheus posts it."""
    now = datetime.now(timezone.utc)
    return {
        "labels": {"alertname": name, "severity": SEVERITY[name], **labels},
        "startsAt": now.isoformat(),
        "endsAt": (now + timedelta(hours=1)).isoformat(),
    }


@needs_alertmanager
async def test_alerts_that_only_repeat_are_inhibited_and_others_notify(alertmanager: str) -> None:
    reports = [
        fired("EngineDown", D0),
        fired("TtftBudgetBurning", {**TTFT, "severity": "page", "window": "1h"}),
        fired("KvFetchFailed", {**D0, "outcome": "failed"}),
        fired("KvTransfersStuck", P0),  # of another engine
        fired("RequestBudgetBurning", {**TTFT, "slo": "success-edge", "severity": "page", "window": "1h"}),
    ]
    held = [
        fired("EngineHung", D0),
        fired("KvTransfersStuck", D0),
        fired("TtftBudgetBurning", {**TTFT, "severity": "page", "window": "6h"}),
        fired("TtftBudgetBurning", {**TTFT, "severity": "ticket", "window": "3d"}),
        fired("TtftP99High", TTFT),
        fired("TtftBudgetBurning", {**TTFT, "slo": "ttft-decode", "role": "decode", "severity": "page", "window": "1h"}),
    ]

    def key(alert: Mapping[str, Any]) -> str:
        return json.dumps(alert["labels"], sort_keys=True)

    async def settled(session: aiohttp.ClientSession) -> bool:
        async with session.get(f"{alertmanager}/api/v2/alerts") as answer:
            now = {key(alert): bool(alert["status"]["inhibitedBy"]) for alert in await answer.json()}
        states.append(now)
        return now == expected

    expected = {**{key(alert): False for alert in reports}, **{key(alert): True for alert in held}}
    states: list[Mapping[str, bool]] = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{alertmanager}/api/v2/alerts", json=[*reports, *held]) as answer,
    ):
        assert answer.status == 200, await answer.text()
    try:
        await asyncio.wait_for(_until(settled), 60)
    except asyncio.TimeoutError:
        assert states[-1] == expected
