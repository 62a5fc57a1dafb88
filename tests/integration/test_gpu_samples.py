"""Samples of fake GPUs, from a real sidecar through a real collector into answers.

The sidecar and the collector are processes; NVML is a double.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.skips import skip_missing
from nvml.build import CannotBuild, build
from nvml.child import Double
from nvml.scenario import h100

MAIN = "import sys; from handrail_cli.main import main; sys.exit(main())"


@pytest.fixture
def double(tmp_path: Path) -> Double:
    try:
        return Double(build(tmp_path), tmp_path)
    except CannotBuild as reason:
        skip_missing(f"the NVML double cannot be built: {reason}")


@contextmanager
def started(folder: Path, name: str, environment: dict[str, str] | None, *flags: str) -> Iterator[dict[str, str]]:
    """Start a command and yield its addresses once it listens.

    It must end by itself on SIGTERM.
    """
    ready, log = folder / f"{name}.ready", (folder / f"{name}.log").open("w")
    command = [sys.executable, "-c", MAIN, name, *flags, "--ready-file", str(ready)]
    process = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
    try:
        until(ready.exists)
        yield json.loads(ready.read_text())["addresses"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


def until(met: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := met()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_samples_of_gpus_reach_the_answers(double: Double, tmp_path: Path) -> None:
    local = "127.0.0.1:0"
    flags = ("--otlp-http", local, "--api", local, "--data", str(tmp_path / "data"), "--flush-interval", "500ms")
    with started(tmp_path, "collector", None, *flags) as collector:
        environment = double.environment(h100(2))
        with started(
            *(tmp_path, "sidecar", environment, "--role", "decode", "--instance", "10.0.0.7:8200"),
            *("--plugin-socket", str(tmp_path / "s"), "--collector", f"http://{collector['otlp_http']}"),
        ) as sidecar:

            def answer() -> Any:
                url = f"http://{collector['api']}/api/v1/samples?kind=gpu&since=-1m"
                with urllib.request.urlopen(url, timeout=30) as response:
                    devices = json.load(response)["devices"]
                return devices if devices and len(devices[0]["at_unix_ns"]) > 20 else None

            devices = until(answer)
            with urllib.request.urlopen(f"http://{sidecar['admin']}/metrics", timeout=30) as response:
                page = response.read().decode()
    assert [(each["key"], each["instance"], each["kind"]) for each in devices] == [
        ("GPU-fake-0", "10.0.0.7:8200", "gpu"),
        ("GPU-fake-1", "10.0.0.7:8200", "gpu"),
    ]
    series = {(one["name"], one["label"]): one for one in devices[0]["series"]}
    assert {"utilization_ratio", "tensor_active_ratio", "dram_active_ratio", "power_watts"} <= {name for name, _ in series}
    moved = [value for value in series["nvlink_bytes", "receive"]["values"] if value is not None]
    assert moved == sorted(moved)
    assert all(isinstance(value, int) for value in moved)
    assert series["nvlink_bytes", "receive"]["counting_since_unix_ns"] > 0
    assert "handrail_sidecar_device_samples_sent_total" in page
    assert 'handrail_sidecar_device_samples_dropped_total{reason="fault"} 0.0' in page
