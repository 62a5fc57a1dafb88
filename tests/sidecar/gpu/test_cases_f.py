"""Reported faults of NVML (CASES.md, kind f) by id, through pynvml and the double."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvml.child import Double
from nvml.scenario import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, MISMATCH, NOT_SUPPORTED, UNKNOWN, Scenario, h100, l40s, memory

FIRST_MS = 100


def test_F01_with_mig_on_utilization_is_absent_and_memory_comes_by_mig_uuid(double: Double) -> None:
    scenario = h100().add(
        "gpu 0 mig 2",
        f"gpu 0 error UtilizationRates {NOT_SUPPORTED}",
        *memory(total=42_000_000_000, used=20_000_000_000, which="0.0"),
        *memory(total=42_000_000_000, used=7_000_000_000, which="0.1"),
        "gpu 0.0 set gpm.2 77.0",
    )
    found = double.call("nvml.virtual:values_at", scenario, 2.0, 100_000_000, virtual=True)
    parent, first, second = (found["values"][uuid] for uuid in ("GPU-fake-0", "MIG-fake-0-0", "MIG-fake-0-1"))
    assert "utilization_ratio" not in parent
    assert found["absent"]["GPU-fake-0"]["utilization_ratio"] == NOT_SUPPORTED
    assert parent["power_watts"] == 530
    assert parent["memory_used_bytes"] == 40_000_000_000
    assert (first["memory_used_bytes"], second["memory_used_bytes"]) == (20_000_000_000, 7_000_000_000)
    assert first["sm_active_ratio"] == 0.77
    assert "sm_active_ratio" not in second
    assert "clock_hertz{sm}" not in first  # the GPU's error, reported once by the GPU
    assert found["parents"] == {"GPU-fake-0": "", "MIG-fake-0-0": "GPU-fake-0", "MIG-fake-0-1": "GPU-fake-0"}


def test_F01_an_absent_counter_is_reported_once_and_is_no_zero_on_the_page(double: Double) -> None:
    scenario = h100().add("gpu 0 mig 2", f"gpu 0 error UtilizationRates {NOT_SUPPORTED}")
    found = double.call("nvml.runs:reported", scenario, 60)
    page = found["page"].splitlines()
    assert not [line for line in page if line.startswith("handrail_gpu_utilization_ratio{")]
    supported = 'handrail_gpu_counter_supported{counter="%s",gpu="0",uuid="GPU-fake-0"} %s'
    assert supported % ("utilization_ratio", "0.0") in page
    assert supported % ("power_watts", "1.0") in page
    statements = [line for line in found["lines"] if "utilization_ratio" in line]
    assert len(statements) == 1
    assert "not supported" in statements[0]
    assert "sm_active_ratio is more exact" in statements[0]


@pytest.mark.parametrize(
    ("lines", "present"),
    [
        ([f"gpu * error MemoryInfo {NOT_SUPPORTED}", f"gpu * error MemoryInfo_v2 {NOT_SUPPORTED}"], False),
        ([f"gpu * error MemoryInfo {NOT_SUPPORTED}", "gpu * error MemoryInfo_v2 13"], False),  # the function does not exist
        ([f"gpu * error MemoryInfo {NOT_SUPPORTED}"], True),
    ],
    ids=["neither", "no function", "second version only"],
)
def test_F02_memory_not_supported_hides_nothing_else_and_zero_is_a_true_zero(
    double: Double, lines: list[str], present: bool
) -> None:
    scenario = Scenario(
        "gpu * name NVIDIA GB10",
        *memory(total=128_000_000_000, used=5_000_000_000),
        "gpu * set utilization 0",
        "gpu * set power 11170",
        "gpu * set temperature.0 35",
        *lines,
    )
    values = double.call("nvml.virtual:values_at", scenario, 2.0, 100_000_000, virtual=True)["values"]["GPU-fake-0"]
    assert ("memory_used_bytes" in values) is present
    assert (values["utilization_ratio"], values["power_average_watts"], values["temperature_celsius{gpu}"]) == (0, 11.17, 35)


def test_F02_a_binding_without_the_second_version_is_read_the_first_way(double: Double) -> None:
    scenario = Scenario(*memory(total=1000, used=400, reserved=100))
    scenario.add("gpu * error MemoryInfo_v2 13")
    values = double.call("nvml.virtual:values_at", scenario, 2.0, 100_000_000, virtual=True)["values"]["GPU-fake-0"]
    assert values["memory_used_bytes"] == 500  # the first version counts reserved memory as used
    assert "memory_reserved_bytes" not in values


def test_F04_a_call_that_hangs_holds_up_nothing_and_comes_back(double: Double) -> None:
    scenario = h100(3).add("gpu 1 hang UtilizationRates released")
    others = ["power_watts", "clock_hertz", "throttled", "pcie_bytes", "sm_active_ratio"]
    found = double.call("nvml.runs:hang", scenario, "utilization_ratio", others)
    assert found["during"] == 0
    assert "nvmlDeviceGetUtilizationRates" in found["hanging"]
    assert "utilization_ratio" not in found["fresh"]
    assert "power_watts" in found["fresh"]
    assert found["after"] > 0
    assert found["not_replaced"] == 0


def test_F04_a_field_that_hangs_takes_only_itself_out_of_its_batch(double: Double) -> None:
    scenario = h100(2).add("gpu 1 hang field.186 released")
    found = double.call("nvml.runs:hang", scenario, "power_watts", ["pcie_bytes", "nvlink_bytes", "utilization_ratio"])
    assert found["during"] == 0
    assert "field 186" in found["hanging"]
    assert "fields tick" in found["steps"]
    assert "field 186" not in found["steps"]  # one batch again


def test_F04_what_was_read_before_a_call_hung_is_not_shown_as_if_it_were_now(double: Double) -> None:
    scenario = h100(2).add("at 2 gpu 1 hang UtilizationRates released")
    assert double.call("nvml.runs:goes_stale", scenario, virtual=True)["others"]


def test_F04_stopping_waits_for_no_call_and_threads_are_bounded(double: Double) -> None:
    found = double.call("nvml.runs:everything_of_one_gpu_hangs", h100(2).add("at 0.5 gpu 1 hang * released"), virtual=True)
    assert found["threads"] <= 16  # on a busy machine calls of the other GPU may seem to hang as well
    assert 0 < found["given_up"] <= 6
    assert found["faults"] == 0


def test_F04_a_gpu_that_hangs_from_the_start_does_not_hide_the_others(double: Double) -> None:
    found = double.call("nvml.runs:hangs_from_the_start", h100(2).add("gpu 1 hang * released"))
    assert found == {"lost": {"1": -2}, "kinds": ["gpu_lost", "gpu_back"]}


def test_F05_the_sampler_waits_for_a_driver_and_says_each_reason_once(double: Double) -> None:
    scenario = h100().add(f"init {MISMATCH} {LIBRARY_NOT_FOUND} {DRIVER_NOT_LOADED} 4 0")
    found = double.call("nvml.runs:init_until_ready", scenario)
    assert found == {"problems": [MISMATCH, LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, 4], "sessions": 1, "faults": 0}


def test_F05_without_a_library_it_says_what_would_bring_one(double: Double) -> None:
    found = double.call("nvml.runs:no_library", None)
    assert found["code"] == LIBRARY_NOT_FOUND
    assert "libnvidia-ml.so.1" in found["words"]
    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in found["remedy"]
    assert found["events"] == []  # a host without GPUs is no event


@pytest.mark.parametrize(("bytes_", "known"), [("1061158912", 1061158912), ("none", None)])
def test_F07_a_pid_of_the_host_is_nobody_here(double: Double, tmp_path: Path, bytes_: str, known: int | None) -> None:
    scenario = Scenario(f"gpu 0 process 28290 {bytes_}")
    (process,) = double.call("nvml.virtual:processes", scenario, str(tmp_path))
    assert process == {"gpu": "GPU-fake-0", "pid": 28290, "memory_bytes": known, "seen_here": False, "name": ""}


def test_F07_a_pid_that_holds_no_gpu_is_not_taken_for_the_process(double: Double, tmp_path: Path) -> None:
    for pid, device in ((28290, "/dev/null"), (28291, "/dev/nvidia0")):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "3").symlink_to(device)
        (folder.parent / "comm").write_text("VLLM::Worker_TP\n")
    found = double.call("nvml.virtual:processes", Scenario("gpu 0 process 28290 1", "gpu 0 process 28291 1"), str(tmp_path))
    assert [(each["seen_here"], each["name"]) for each in found] == [(False, ""), (True, "VLLM::Worker_TP")]


def test_F07_no_list_at_all(double: Double, tmp_path: Path) -> None:
    assert double.call("nvml.virtual:processes", Scenario(), str(tmp_path)) == []


def test_F08_nvlink_fields_are_kib_by_link_and_refused_links_are_passed_over(double: Double) -> None:
    links = [f"gpu 0 set field.138:{link} 1000000 rate 234700" for link in range(12)]
    links += [f"gpu 0 set field.139:{link} 5000000 rate 2700000" for link in range(12)]
    found = double.call("nvml.virtual:field_rates", Scenario(*links), 1.0, virtual=True)
    assert found["rates"] == {"transmit": 2_883_993_600, "receive": 33_177_600_000}
    assert found["reads"][0] == {}  # the first query is the sum over all links, which does not exist
    assert set(found["reads"][1].values()) == {0}  # the first reading gives no rate


def test_F08_the_sum_over_all_links_is_one_field(double: Double) -> None:
    scenario = Scenario("gpu 0 set field.138:all 1 rate 234700", "gpu 0 set field.139:all 7 rate 2700000")
    found = double.call("nvml.virtual:field_rates", scenario, 2.0, virtual=True)
    assert found["rates"] == {"transmit": 234_700 * 1024, "receive": 2_700_000 * 1024}


def test_F10_the_blocking_call_is_made_beside_the_loop_and_is_in_bytes(double: Double) -> None:
    scenario = Scenario(
        "gpu * set utilization 50",
        "gpu * set pcie.throughput.0 12582912",
        "gpu * set pcie.throughput.1 341",
        "gpu * latency PcieThroughput 0.02",
        count=8,
    )
    found = double.call("nvml.runs:snapshots", scenario)
    assert found["values"] == {"transmit": 12_582_912_000, "receive": 341_000}
    assert set(found["lanes"]) == {"snapshots"}  # more than one where a busy machine makes a call seem to hang
    assert not found["in_loop"]
    assert "pcie_bytes" in found["absent"]
    assert "pcie_snapshot_bytes_per_second" not in found["absent"]


def test_F10_where_bytes_are_counted_the_blocking_call_is_never_made(double: Double) -> None:
    scenario = l40s().add("gpu * set pcie.throughput.0 1", "gpu * set pcie.throughput.1 1")
    found = double.call("nvml.virtual:values_at", scenario, 2.0, 100_000_000, virtual=True)
    assert found["snapshots"] == []


def test_F11_a_rate_that_stays_zero_while_bytes_move_is_not_reported(double: Double) -> None:
    scenario = h100().add("gpu 0 set gpm.20 0.0", "gpu 0 set gpm.21 0.0")
    found = double.call("nvml.virtual:values_at", scenario, 6.0, 110_000_000, virtual=True)
    assert found["absent"]["GPU-fake-0"] == {"pcie_bytes_per_second{receive}": -3, "pcie_bytes_per_second{transmit}": -3}
    assert "pcie_bytes{receive}" in found["values"]["GPU-fake-0"]


def test_F11_bytes_that_stay_zero_while_the_rate_moves_are_not_reported(double: Double) -> None:
    scenario = h100().add(*(f"gpu 0 set field.{field}:all 7" for field in (138, 139)))
    found = double.call("nvml.virtual:values_at", scenario, 6.0, 110_000_000, virtual=True)
    assert set(found["absent"]["GPU-fake-0"]) == {"nvlink_bytes{receive}", "nvlink_bytes{transmit}"}


def test_F11_an_idle_link_is_a_true_zero(double: Double) -> None:
    scenario = h100().add(
        *(f"gpu 0 set field.{field} 5000000000" for field in (197, 198)), "gpu 0 set gpm.20 0.0", "gpu 0 set gpm.21 0.0"
    )
    found = double.call("nvml.virtual:values_at", scenario, 6.0, 110_000_000, virtual=True)
    assert found["absent"]["GPU-fake-0"] == {}
    assert found["values"]["GPU-fake-0"]["pcie_bytes_per_second{receive}"] == 0


def test_F13_an_xid_is_counted_when_it_comes_and_does_not_stay(double: Double) -> None:
    scenario = h100(2).add("at 0.3 gpu 1 xid 31", "at 0.4 gpu 1 xid 31", "at 0.5 gpu 0 xid 62")
    found = double.call("nvml.runs:xids", scenario, 3, virtual=True)
    assert found["counts"] == {"GPU-fake-1 31": 2, "GPU-fake-0 62": 1}
    assert found["page"]["1 31"] == 2
    assert found["page"]["0 62"] == 1
    assert found["page"]["0 79"] == 0
    assert found["page"]["1 79"] == 0
    assert sorted(found["details"]) == ["GPU 0 (GPU-fake-0): Xid 62", "GPU 1 (GPU-fake-1): Xid 31"]


def test_F13_a_storm_of_one_error_is_counted_and_logged_once(double: Double) -> None:
    found = double.call("nvml.runs:xids", h100(2).add(*["at 0.3 gpu 1 xid 94"] * 50), 50, virtual=True)
    assert found["counts"] == {"GPU-fake-1 94": 50}
    assert found["details"] == ["GPU 1 (GPU-fake-1): Xid 94"]


def test_F13_where_events_are_refused_the_series_is_absent(double: Double) -> None:
    found = double.call("nvml.runs:reported", h100().add(f"gpu * error RegisterEvents {NOT_SUPPORTED}"), 60)
    page = found["page"].splitlines()
    assert not [line for line in page if line.startswith("handrail_gpu_xid_errors_total{")]
    assert 'handrail_gpu_counter_supported{counter="xid_errors",gpu="0",uuid="GPU-fake-0"} 0.0' in page
    assert [line for line in found["lines"] if "gives no xid_errors" in line and "kernel's log" in line]


def test_F18_a_call_that_is_unknown_or_refused_hides_no_gpu(double: Double) -> None:
    scenario = Scenario(
        *memory(total=8_589_934_592, used=169_000_000, which="0"),
        f"gpu 0 error UtilizationRates {UNKNOWN}",
        f"at 1 gpu 0 error UtilizationRates {NOT_SUPPORTED}",
        "gpu 1 name Orin",
        f"gpu 1 error * {NOT_SUPPORTED}",
        "gpu 1 error Name 0",
        "gpu 1 error UUID 0",
        "gpu 1 error HandleByIndex 0",
        count=2,
    )
    found = double.call("nvml.runs:unknown_then_refused", scenario, virtual=True)
    assert found["listed"] == ["GPU-fake-0", "GPU-fake-1"]
    assert found["memory"] > 5
    assert found["alive"]
    assert found["utilization"] == 0
    assert found["retried"] >= 1  # Unknown is tried again
    assert found["absent"]["GPU-fake-0 utilization_ratio"] == NOT_SUPPORTED  # Not Supported is remembered
    assert found["orin_values"] == []
    assert json.loads(json.dumps(found))["faults"] == 0
