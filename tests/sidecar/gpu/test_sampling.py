"""The sampler against the double, partly in virtual time.

The tests cover wraps, what is lost and comes back, and what a driver's answer may hold.
"""

from __future__ import annotations

import json
from math import isclose

import pytest

from handrail.device_counters.gpu import ALL, COUNTERS, KNOWN_XIDS, NAMES, NvmlCall, NvmlField
from handrail_sidecar.gpu.failures import FAILURES, Meaning, code_of, failure
from handrail_sidecar.gpu.values import decoded
from nvml.child import Double
from nvml.scenario import DOUBLE, DRIVER_NOT_LOADED, GPU_IS_LOST, SIGNED_INT, UNSIGNED_INT, Scenario, h100, l40s

NS = 1_000_000_000


def grown(start: int, rate: int, first_ns: int, last_ns: int) -> int:
    """Return the growth of the double's counter, in whole numbers, as it computes it."""
    return (start + rate * last_ns // NS) - (start + rate * first_ns // NS)


@pytest.mark.parametrize(
    ("generation", "rates", "jitter_ms"),
    [(5, (62_900_000_000, 40_000_000_000), 3), (4, (31_000_000_000, 1_000_000), 3), (3, (15_700_000_000, 0), 20)],
    ids=["gen5", "gen4", "gen3"],
)
def test_ten_minutes_of_32_bit_counters_at_line_rate_are_exact(
    double: Double, generation: int, rates: tuple[int, int], jitter_ms: int
) -> None:
    scenario = Scenario(
        f"gpu * set pcie.generation.max {generation}",
        "gpu * set pcie.width.max 16",
        f"gpu * set field.197 4294967000 rate {rates[0]} bits 32 type {UNSIGNED_INT}",
        f"gpu * set field.198 17 rate {rates[1]} bits 32",  # typed as 64 bits, but only 32 wide
    )
    found = double.call("nvml.virtual:byte_counters", scenario, 600.0, 100_000_000, jitter_ms * 1_000_000, virtual=True)
    assert found["falls"] == 0
    for label, start, rate in (("transmit", 4294967000, rates[0]), ("receive", 17, rates[1])):
        end = found["ends"][f"0 pcie_bytes {label}"]
        assert end["last_ns"] > 599 * NS
        assert len(end["starts"]) == 1  # never restarted
        assert end["last"] == grown(start, rate, end["first_ns"], end["last_ns"])


def test_ten_minutes_of_eight_gpus_with_every_width_are_exact(double: Double) -> None:
    scenario = h100(8).add(
        "gpu 3 set field.138:all 4294960000 rate 90000000 bits 32",  # KiB: wraps every 48 s at this rate
        "gpu 4 set field.197 18446744073709551000 rate 3000000000",
    )
    found = double.call("nvml.virtual:byte_counters", scenario, 600.0, 1 * NS, 50_000_000, virtual=True)
    assert found["falls"] == 0
    rates = {"pcie_bytes receive": (17_000_000_000, 25_000_000_000, 1), "nvlink_bytes receive": (5_000_000, 180_000_000, 1024)}
    for index in range(8):
        for name, (start, rate, unit) in rates.items():
            end = found["ends"][f"{index} {name}"]
            assert (end["last"], len(end["starts"])) == (unit * grown(start, rate, end["first_ns"], end["last_ns"]), 1)
    kib = found["ends"]["3 nvlink_bytes transmit"]
    assert kib["last"] == 1024 * grown(4294960000, 90_000_000, kib["first_ns"], kib["last_ns"])


def test_bytes_are_read_with_the_windows_where_these_tell_their_rate_and_else_at_every_tick(double: Double) -> None:
    """Read byte counters with the windows if these give rates, else at every tick.

    In 20 s: an H100, one whose PCIe rates are not believed after some seconds, and one without performance monitoring.
    """
    still = ("gpu 1 set gpm.20 0", "gpu 1 set gpm.21 0")
    none = ("gpu 2 error GpmQueryDeviceSupport 3",)
    found = double.call("nvml.virtual:byte_counters", h100(3).add(*still, *none), 20.0, 100_000_000, 0, virtual=True)["ends"]
    reads = {name: end["reads"] for name, end in found.items() if "receive" in name}
    assert 100 <= reads["0 pcie_bytes receive"] <= 110
    assert 100 <= reads["0 nvlink_bytes receive"] <= 110
    assert 160 <= reads["1 pcie_bytes receive"] <= 195
    assert 100 <= reads["1 nvlink_bytes receive"] <= 110
    assert 200 <= reads["2 pcie_bytes receive"] <= 203  # at first faster, until its width is known
    assert 200 <= reads["2 nvlink_bytes receive"] <= 201
    for end in found.values():
        assert len(end["starts"]) == 1  # moved, and not restarted


def test_counters_that_performance_monitoring_reads_better_are_queried_once_a_second(double: Double) -> None:
    scenario = h100(2).add("gpu 1 error GpmQueryDeviceSupport 3", "gpu * set utilization 1 rate 5")
    reads = double.call("nvml.virtual:reads", scenario, 10.0, "utilization_ratio", virtual=True)
    assert 13 <= reads["0"] <= 17  # with the windows until the width is known
    assert reads["1"] == 50


@pytest.mark.parametrize("without", [("field.138", "field.139"), ("utilization", "field.138", "field.139"), ()], ids=str)
def test_bytes_are_read_on_while_performance_monitoring_is_read_alone(double: Double, without: tuple[str, ...]) -> None:
    scenario = h100()
    scenario.lines[:] = [line for line in scenario.lines if not any(f" {name}" in line for name in without)]
    scenario = scenario.add(*(f"gpu 0 set field.{field} 17 rate 3000000000" for field in (197, 198)))  # 64 bits, seen at 1.4 s
    ages_ms = double.call("nvml.virtual:windows_apart", scenario, 20.0, virtual=True)
    assert "pcie_bytes receive" in ages_ms
    assert max(ages_ms.values()) <= 200


def test_rates_that_are_refused_later_give_way_to_their_counts(double: Double) -> None:
    later = [f"at 5 gpu 0 error {call} 3" for call in ("GpmMetricsGet", "GpmSampleGet")]
    before = double.call("nvml.virtual:paces", h100(), 10.0, virtual=True)["paces"]
    after = double.call("nvml.virtual:paces", h100().add(*later), 10.0, virtual=True)["paces"]
    lines = ("pcie_bytes receive", "nvlink_bytes transmit", "utilization_ratio", "memory_busy_ratio")
    assert [before[name] for name in lines] == ["window", "window", "second", "second"]
    assert [after[name] for name in lines] == ["tick", "tick", "window", "window"]


def test_a_narrow_counter_whose_first_reading_fails_is_read_in_haste_all_the_same(double: Double) -> None:
    fields = (198, 197)
    narrow = [f"gpu 0 set field.{field} 17 rate 25000000000 bits 32" for field in fields]
    fails = [line for field in fields for line in (f"gpu 0 error field.{field} 21", f"at 0.04 gpu 0 error field.{field} 0")]
    found = double.call("nvml.virtual:paces", h100().add(*narrow, *fails), 20.0, virtual=True)
    assert found["paces"]["pcie_bytes receive"] == "bytes"
    assert (found["absent"], found["anew"]) == ([], 0)


def test_counters_that_may_turn_within_a_window_stay_with_the_ticks(double: Double) -> None:
    narrow = (f"gpu 0 set field.{field} 7 rate 25000000000 bits 32 type {UNSIGNED_INT}" for field in (197, 198))
    found = double.call("nvml.virtual:byte_counters", h100().add(*narrow), 20.0, 50_000_000, 0, virtual=True)
    end = found["ends"]["0 pcie_bytes receive"]
    assert end["reads"] >= 390
    assert (end["last"], len(end["starts"])) == (grown(7, 25_000_000_000, end["first_ns"], end["last_ns"]), 1)


def test_performance_monitoring_is_never_read_closer_than_100_ms_and_leaves_no_hole(double: Double) -> None:
    found = double.call("nvml.virtual:windows", h100(), [0, 105, 60, 39, 2, 105, 1000], virtual=True)
    spans = [round(each.get("activity_window_seconds", 0), 3) for each in found]
    assert spans == [0, 0.105, 0, 0, 0.101, 0.105, 1.0]  # 60 + 39 + 2 ms are one window
    assert isclose(found[1]["sm_active_ratio"], 0.415)
    assert found[1]["nvlink_bytes_per_secondreceive"] == 3000 * 2**20


def test_a_gpu_is_lost_and_back_while_the_other_is_read_on(double: Double) -> None:
    scenario = h100(2).add(f"at 1 gpu 1 error * {GPU_IS_LOST}", "at 2 gpu 1 error * 0")
    found = double.call("nvml.runs:lost_and_back", scenario, virtual=True)
    assert found["lost"] == ["GPU 1 (GPU-fake-1): the GPU has fallen off the bus"]
    assert found["page"] == [0]  # no old value of GPU 1
    assert found["kinds"] == ["gpu_lost", "gpu_back"]
    assert (found["starts"], found["sessions"]) == (2, 1)


def test_a_gpu_is_lost_in_one_field_of_a_batch(double: Double) -> None:
    scenario = h100(2).add(f"at 1 gpu 1 error field.197 {GPU_IS_LOST}", "at 2 gpu 1 error field.197 0")
    assert double.call("nvml.runs:lost_and_back", scenario, virtual=True)["kinds"][0] == "gpu_lost"


@pytest.mark.parametrize("lost", [True, False])
def test_answers_are_delivered_though_the_gpu_is_lost_or_the_sampler_stops(double: Double, lost: bool) -> None:
    scenario = h100(2).add(*([f"at 3 gpu 1 error * {GPU_IS_LOST}"] if lost else []))
    found = double.call("nvml.runs:samples_to_the_end", scenario, lost, virtual=True)
    assert found["delivered"] > 12
    assert found["queried"] - found["delivered"] in (
        (0, 1) if lost else (0,)
    )  # the round in which the GPU was lost does not count


def test_fields_that_are_refused_in_two_answers_are_moved_on_once(double: Double) -> None:
    scenario = h100().add("gpu 0 error field.186 3")
    found = double.call("nvml.virtual:called_twice", scenario, virtual=True)
    assert found["gone"] == ["power_watts"]
    assert set(found["left"]) == {"nvlink_bytes"}
    assert found["reported"] == [["nvlink_bytes", "nvlink_bytes"]] * 2


def test_a_driver_that_is_restarted_gets_a_new_session(double: Double) -> None:
    found = double.call("nvml.runs:driver_restart", h100(2).add(f"at 1 driver_gone {DRIVER_NOT_LOADED} 1"), virtual=True)
    assert found["kinds"] == ["gpu_lost", "gpu_back"]
    assert (found["sessions"], found["starts"] >= 2) == (2, True)


def test_garbage_is_left_out_and_counted_and_hides_nothing(double: Double) -> None:
    scenario = h100().add(
        "gpu 0 set utilization 4294967295",
        f"gpu 0 set field.186 4294967295 type {UNSIGNED_INT}",
        f"gpu 0 set field.82 -5 type {SIGNED_INT}",
        f"gpu 0 set field.83 nan type {DOUBLE}",
        "gpu 0 set field.94 1 type 6",
        "gpu 0 set field.142 1 type 77",
        "gpu 0 set gpm.2 nan",
        "gpu 0 set gpm.3 1e300",
    )
    found = double.call("nvml.virtual:values_at", scenario, 2.0, 100_000_000, virtual=True)
    values = found["values"]["GPU-fake-0"]
    gone = {"utilization_ratio", "power_watts", "temperature_celsius{memory}", "energy_joules", "remapped_rows{corrected}"}
    assert not (gone | {"sm_active_ratio", "sm_occupancy_ratio"}) & set(values)
    assert values["pcie_replays"] == 1
    assert values["tensor_active_ratio"] == 0.3025
    assert found["absent"]["GPU-fake-0"] == {}  # the next answer may make sense


def test_a_driver_that_says_nonsense_of_its_gpus_hides_no_other(double: Double) -> None:
    scenario = h100(3).add("gpu 0 uuid GPU-\udcff\udcfe", "gpu 1 name \udcff\udcff", "count_told 4294967295")
    found = double.call("nvml.runs:garbage", scenario)
    assert found["read"] == ["GPU-fake-1", "GPU-fake-2"]
    assert found["products"] == ["", "NVIDIA H100 80GB HBM3"]
    assert found["lost"] == {"0": 999}
    assert found["faults"] == 0


def test_an_l40s_names_what_it_lacks(double: Double) -> None:
    found = double.call("nvml.virtual:values_at", l40s(), 2.0, 100_000_000, virtual=True)
    absent = {name.partition("{")[0] for name in found["absent"]["GPU-fake-0"]}
    assert {"sm_active_ratio", "nvlink_bytes", "power_watts", "ecc_errors"} <= absent
    assert not {"utilization_ratio", "pcie_bytes", "energy_joules"} & absent
    assert found["values"]["GPU-fake-0"]["pcie_line_bytes_per_second"] == 16 * 256e9 / 130


def test_fifty_samplers_leave_no_thread(double: Double) -> None:
    assert double.call("nvml.runs:open_and_close", h100(2), 50) == {"threads": 1}


@pytest.mark.parametrize(
    ("kind", "bits", "value"),
    [
        (0, 0x3FF8000000000000, 1.5),
        (1, 0xA5A5A5A500000007, 7),
        (2, 1 << 40, 1 << 40),
        (3, (1 << 64) - 1, (1 << 64) - 1),
        (4, (1 << 64) - 3, -3),
        (5, 0xA5A5A5A5FFFFFFFE, -2),
        (6, 0xA5A5A5A5A5A50009, 9),
        (99, 5, -1),
    ],
)
def test_a_field_is_read_by_its_type_alone(kind: int, bits: int, value: float) -> None:
    assert decoded(kind, bits) == value


def test_every_code_of_nvml_h_that_a_call_can_give_has_a_meaning() -> None:
    assert failure(999).meaning is Meaning.RETRY
    assert failure(12345).meaning is Meaning.RETRY
    for each in FAILURES.values():
        assert each.words
    with pytest.raises(ZeroDivisionError):
        code_of(ZeroDivisionError())


def test_the_table_holds_what_it_promises() -> None:
    names = [counter.name for counter in ALL]
    assert len(names) == len(set(names))
    assert set(NAMES) <= set(names)
    for row in COUNTERS:
        assert row.counter.help, row.name
        assert row.counter.absent, row.name
        assert len({value.label for value in row.values}) == len(row.values), row.name
        assert bool(row.counter.label) == bool(row.values[0].label), row.name
        for value in row.values:
            for how in value.reads:
                assert how.times == 1 or how.per == 1
                assert not (isinstance(how, NvmlField) and 251 <= how.id <= 273), "driver 580.82 gave these ids other meanings"
                assert not (isinstance(how, NvmlCall) and "PcieThroughput" in how.function) or row.pace.value == "snapshot"
    assert json.dumps(sorted(KNOWN_XIDS))
