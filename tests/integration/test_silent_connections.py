"""Thousands of silent connections beside good senders, on a collector's process.

Half of the connections use TLS.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path

import pytest

from doubles.otlp import span, traces, until
from faults.connections import flooding, result_of
from faults.silence import beside_silence
from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Accepted, Signal
from harness.web import get

COUNT = 5000
OWN = 200  # descriptors that the flooding process needs besides


@pytest.mark.timeout(600)
@pytest.mark.parametrize("descriptors", [None, 1024], ids=["the limit of this machine", "1024 descriptors"])
async def test_good_senders_lose_nothing(descriptors: int | None, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = COUNT if hard == resource.RLIM_INFINITY else min(COUNT, hard - OWN)
    seen = await beside_silence(tmp_path, 3.0, count=count, descriptors=descriptors, refusals=100)
    assert seen["alive"], seen["log"]
    assert seen["exit_status"] == 0
    assert seen["lost_spans"] == 0
    assert all(sender["batches"] > 0 for sender in seen["senders"].values())
    # a line for each listener and reason, however many are refused
    assert [line for line in seen["log"] if "refuses connections" not in line and "pauses accepting" not in line] == []
    assert len(seen["log"]) <= 6


@pytest.mark.timeout(600)
async def test_sidecar_answers_beside_silence(tmp_path: Path) -> None:
    """The sidecar's health, metrics and tap answer at 1,024 descriptors.

    Meanwhile 2,000 connections from another address say nothing.
    """
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "handrail_cli.main", "sidecar", "--role", "decode", "--instance", "10.0.0.7:8100"]
    command += ["--collector", "http://127.0.0.1:9", "--admin", "127.0.0.1:0", "--otlp-grpc", "127.0.0.1:0"]
    command += ["--otlp-http", "127.0.0.1:0", "--gpu-sample", "off", "--links-sample", "off", "--ready-file", str(ready)]
    with (tmp_path / "sidecar.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", 'ulimit -Sn 512 && ulimit -Hn 1024 && exec "$@"', "sh", *command, stdout=log, stderr=log
        )
    try:
        await until(ready.exists, 180)
        places = json.loads(ready.read_text())["addresses"]
        listeners = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in places.values())]
        async with flooding(listeners, 2000, 0.0) as flood:
            while "refuses connections" not in (tmp_path / "sidecar.log").read_text():  # noqa: ASYNC110 - a process's log
                await asyncio.sleep(0.1)
            for scheme in ("grpc", "http"):
                client = OtlpClient(ClientSettings(endpoint=f"{scheme}://{places[f'otlp_{scheme}']}", timeout_s=60))
                assert await client.send(Signal.TRACES, traces(span(1)).SerializeToString()) == Accepted()
                await client.close()
            page = await asyncio.to_thread(get, f"http://{places['admin']}/metrics")
            assert await asyncio.to_thread(get, f"http://{places['admin']}/readyz") == "ok\n"
            await result_of(flood)
        assert "handrail_descriptors_limit 1024.0" in page
        assert child.returncode is None
        output = (tmp_path / "sidecar.log").read_text()
        assert "descriptors 1024 (raised from 512)" in output
        assert output.count("refuses connections") <= 6
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
