"""Run the checks for a real GPU against the double, so that they do not rot.

The tests also read every kept recording.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.check import Span
from handrail.device_counters.gpu import ALL
from handrail.device_counters.gpu import BY_NAME as TABLE
from handrail.records import Process, Role, Source
from handrail.records.devices import Device, DeviceKind, DeviceSample, DeviceValue
from nvml.child import TESTS, Double
from nvml.scenario import h100

RECORDINGS = sorted((TESTS / "golden" / "gpu").glob("*.jsonl"))
KNOWN = {counter.name: counter for counter in ALL}


def check(double: Double, folder: Path, *, gpus: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu.check", str(folder), "--seconds", "0.5"],
        env=double.environment(h100(2) if gpus else None),
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_checks_run_and_write_a_report_and_a_recording(double: Double, tmp_path: Path) -> None:
    done = check(double, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" in done.stderr  # skipped, and reported
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["available"]) == {*TABLE, "xid_errors"} - {"pcie_snapshot_bytes_per_second"}
    assert report["width"]["0 pcie_bytes receive"] == [64]
    assert {each["name"] for each in report["checks"]} == {"processor at 10 Hz", "processor at 100 Hz"}
    assert_sound(tmp_path / "recording.jsonl")


def test_without_a_gpu_it_says_so(double: Double, tmp_path: Path) -> None:
    done = check(double, tmp_path, gpus=False)
    assert done.returncode == 3
    assert "no GPU to check: libnvidia-ml.so.1 was not found" in done.stderr


if RECORDINGS:  # bash tests/gpu/run.sh makes one on a machine with a GPU

    @pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
    def test_a_recording_of_a_real_gpu_is_sound(recording: Path) -> None:
        assert_sound(recording)


def assert_sound(recording: Path) -> None:
    """Assert that names are known, ratios are ratios, and counters only grow."""
    last: dict[tuple[str, str], float] = {}
    for line in recording.read_text().splitlines():
        sample = json.loads(line)
        for key, value in sample["values"].items():
            counter = KNOWN[key.partition("{")[0]]
            assert value >= 0
            assert counter.unit != "1" or value <= 1.05
            if counter.kind.value == "counter":
                assert value >= last.get((sample["uuid"], key), 0)
                last[sample["uuid"], key] = value
    assert last


def test_a_span_counts_whole_windows_only_and_weights_them() -> None:
    def sample(at: float, value: float, window: float) -> DeviceSample:
        values = (DeviceValue(name="dram_active_ratio", value=value), DeviceValue(name="activity_window_seconds", value=window))
        device = Device(kind=DeviceKind.GPU, key="GPU-a")
        process = Process(role=Role.UNKNOWN, instance="", host="")
        return DeviceSample(process=process, source=Source.NVML, device=device, at_unix_ns=int(at * 1e9), values=values)

    span = Span("GPU-a", {("pcie_bytes", "receive"): 10}, moved=1, began_ns=1_000_000_000, ended_ns=2_000_000_000)
    span.samples = [sample(1.05, 0.1, 0.1), sample(1.2, 0.5, 0.1), sample(1.6, 0.8, 0.2), sample(2.1, 0.0, 0.1)]
    span.after = {("pcie_bytes", "receive"): 15}
    assert span.mean("dram_active_ratio") == pytest.approx((0.5 * 0.1 + 0.8 * 0.2) / 0.3)
    assert span.mean("sm_active_ratio") is None
    assert (span.grew("pcie_bytes", "receive"), span.grew("pcie_bytes", "transmit")) == (5, None)
