"""The collector's data folder, removed while it runs.

The collector acknowledges nothing that it cannot store, and ends with an exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from handrail.otlp.client import OtlpClient
from handrail.otlp.settings import ClientSettings
from handrail.otlp.signals import Retryable, Signal
from harness.pipelines import batch, proxies
from harness.ports import held_port

HANGS_S = 120.0


def _remove_data(data: Path) -> Path:
    shutil.rmtree(data)
    return data / "journal"


def _replace_data(data: Path) -> Path:
    data.rename(data.with_name("away"))
    data.mkdir()
    return data / "journal"


def _remove_journal(data: Path) -> Path:
    shutil.rmtree(data / "journal")
    return data / "journal"


def _replace_journal(data: Path) -> Path:
    (data / "journal").rename(data / "away")
    (data / "journal").mkdir()
    return data / "journal"


def _unlink_open_segment(data: Path) -> Path:
    newest = max((data / "journal").glob("*.seg"))
    newest.unlink()
    return newest


def _remove_store(data: Path) -> Path:
    shutil.rmtree(data / "store")
    return data / "store"


def _replace_store(data: Path) -> Path:
    (data / "store").rename(data / "away")
    (data / "store").mkdir()
    return data / "store"


JOURNAL = (_remove_data, _replace_data, _remove_journal, _replace_journal, _unlink_open_segment)
STORE = (_remove_store, _replace_store)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lose", [*JOURNAL, *STORE], ids=lambda lose: lose.__name__[1:])
async def test_a_collector_whose_data_is_gone_ends_and_acknowledges_nothing_more(
    lose: Callable[[Path], Path], tmp_path: Path
) -> None:
    data, ready, log = tmp_path / "data", tmp_path / "ready.json", tmp_path / "log"
    with held_port() as port, log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "handrail_cli.main", "collector", "--data", str(data), "--ready-file", str(ready)),
            *("--otlp-http", f"127.0.0.1:{port}", "--otlp-grpc", "off", "--api", "off", "--flush-interval", "200ms"),
            stdout=output,
            stderr=output,
        )
        client = OtlpClient(ClientSettings(endpoint=f"http://127.0.0.1:{port}"))
        try:
            deadline = time.monotonic() + HANGS_S
            while not ready.exists():
                assert child.returncode is None, log.read_text()
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            await client.send(Signal.TRACES, batch(proxies("req-0", "t0"), 1))
            gone = lose(data)
            acknowledged = 0
            sent = 1
            while child.returncode is None:
                assert time.monotonic() < deadline, log.read_text()
                sent += 1
                with contextlib.suppress(Retryable):
                    await asyncio.wait_for(client.send(Signal.TRACES, batch(proxies(f"req-{sent}", f"t{sent}"), sent)), 60)
                    acknowledged += 1
                await asyncio.sleep(0.01)
            assert await child.wait() == 1
        finally:
            await client.close()
            if child.returncode is None:
                os.kill(child.pid, signal.SIGKILL)
            await child.wait()
    reported_output = log.read_text()
    assert f"{gone}" in reported_output
    assert "deleted or replaced while in use" in reported_output
    assert "Traceback" not in reported_output
    if lose in JOURNAL:
        assert acknowledged == 0
