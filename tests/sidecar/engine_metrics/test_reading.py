"""Metrics pages of every engine and version in one schema.

The tests cover names, units, several engines on a page, and nonsense.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from builders.records import EPOCH, process
from handrail.records import EngineSample, Role, SchemaState
from handrail.records.quantities import BY_NAME, QUANTITIES, QuantityKind
from handrail.wire.engine_samples import metrics_request
from handrail_sidecar.engine_metrics.checks import Expected, page_notes
from handrail_sidecar.engine_metrics.counters import CounterTracks, Increase, increase
from handrail_sidecar.engine_metrics.exposition import families_of
from handrail_sidecar.engine_metrics.family import PREFIXES, emitter_of
from handrail_sidecar.engine_metrics.index import ROWS, find, split_unit
from handrail_sidecar.engine_metrics.page import OTHER, PageReader, PageReading
from handrail_sidecar.engine_metrics.report import schema_notes
from handrail_sidecar.sources.engine_metrics import sample_of

_DATA = Path(__file__).parents[2] / "data"


def page(name: str) -> bytes:
    return (_DATA / name).read_bytes()


def read(text: str | bytes) -> PageReading:
    return PageReader().read(text.encode() if isinstance(text, str) else text)


def sample(reading: PageReading) -> EngineSample:
    return sample_of(reading, process(Role.DECODE), EPOCH, CounterTracks())


def notes(reading: PageReading, **expected: int | Role) -> dict[str, str]:
    return {note.kind: note.text for note in page_notes(sample(reading), reading, Expected(**expected))}  # type: ignore[arg-type]


def states(text: bytes) -> dict[str, str]:
    return {note.quantity: note.state.value for note in schema_notes(families_of(text))[1]}


# --- the table ------------------------------------------------------------------------------------------------------------


def test_rows_name_known_quantities_once() -> None:
    assert not [name for name, count in Counter(row.name for row in ROWS).items() if count > 1]
    for row in ROWS:
        quantity = BY_NAME[row.quantity]
        assert emitter_of(row.name), row.name
        assert bool(row.label or row.fixed) <= bool(quantity.label), row.name
        if quantity.kind is QuantityKind.COUNTER:
            assert row.name.endswith("_total"), row.name


def test_every_quantity_can_come_from_somewhere() -> None:
    assert {row.quantity for row in ROWS} | {"lora_adapters"} == {quantity.name for quantity in QUANTITIES}


def test_nested_prefixes_stand_before_the_shorter_one() -> None:
    names = list(PREFIXES)
    for place, name in enumerate(names):
        assert not [later for later in names[place + 1 :] if later.startswith(name)], name


def test_every_family_of_a_published_list_that_counts_hand_offs_is_known() -> None:
    names = {
        line.split()[0]
        for line in page("metrics/inference-perf_vllm_v0.26.0_families.txt").decode().splitlines()
        if line[0] != "#"
    }
    unknown = {name for name in names if find(name) is None and find(f"{name}_count") is None}
    assert unknown == {
        "vllm:cache_config_info",
        "vllm:engine_sleep_state",
        "vllm:estimated_flops_per_gpu_total",
        "vllm:estimated_read_bytes_per_gpu_total",
        "vllm:estimated_write_bytes_per_gpu_total",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:request_generation_tokens",
        "vllm:request_inference_time_seconds",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_max_tokens",
        "vllm:request_params_n",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_prompt_tokens",
        "vllm:request_time_per_output_token_seconds",
    }


# --- recorded pages -------------------------------------------------------------------------------------------------------


def test_a_recorded_decode_page() -> None:
    reading = read(page("recordings/metrics_decode.txt"))
    assert reading.engines == ("0",)
    assert reading.models == ("tiny",)
    assert reading.total("prompt_tokens") == reading.total("prompt_tokens_by_source")
    assert reading.count("kv_transfer_seconds") == reading.count("kv_transfer_bytes")
    assert reading.of("kv_transfer_failures") == {("0", "nixl"): 0.0}
    assert set(reading.of("kv_queue_requests")) == {
        ("0", stage) for stage in ("waiting_to_start", "in_progress", "completed_waiting")
    }
    assert schema_notes(families_of(page("recordings/metrics_decode.txt"))) == (("vllm", "vllm-nixl"), ())


def test_a_recorded_router_page_names_workers_by_address() -> None:
    reading = read(page("recordings/metrics_router.txt"))
    assert reading.of("router_worker_up") == {("", "127.0.0.1:8100"): 1.0, ("", "127.0.0.1:8200"): 1.0}
    assert reading.total("router_requests") == 22.0
    assert schema_notes(families_of(page("recordings/metrics_router.txt"))) == (("vllm-router",), ())


def test_a_failed_load_poisons_two_sums_and_no_more() -> None:
    reading = read(page("recordings/metrics_decode_after_one_failure.txt"))
    lost = {key[0] for key, buckets in reading.histograms.items() if buckets.total is None}
    assert lost == {"queue_seconds", "prefill_seconds"}
    assert "poisoned_sum" in notes(reading)
    assert all(histogram.total is None or histogram.total >= 0 for histogram in sample(reading).histograms)


# --- reported faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state"), [("D08_A_old", "renamed"), ("D08_B_both", "both"), ("D08_C_new", None)], ids=["old", "both", "new"]
)
def test_D08_one_series_whatever_the_names(name: str, state: str | None) -> None:
    text = page(f"replay/metrics/{name}.prom")
    reading = read(text)
    assert reading.of("kv_cache_usage_ratio") == {("0", ""): 0.4}
    assert [key for key in reading.histograms if key[0] == "inter_token_seconds"] == [("inter_token_seconds", "0", "")]
    assert reading.count("inter_token_seconds") == 100
    assert states(text).get("kv_cache_usage_ratio") == states(text).get("inter_token_seconds") == state


def test_D08_the_new_name_wins_wherever_it_stands() -> None:
    new, old = "vllm:kv_cache_usage_perc 0.5\n", "vllm:gpu_cache_usage_perc 0.4\n"
    assert read(new + old).of("kv_cache_usage_ratio") == read(old + new).of("kv_cache_usage_ratio") == {("", ""): 0.5}


def test_D05_engines_are_distinguished_and_missing_ones_reported() -> None:
    old = read('vllm:num_requests_running{model_name="m"} 3\n')
    new = read("".join(f'vllm:num_requests_running{{model_name="m",engine="{rank}"}} 3\n' for rank in range(4)))
    assert (old.total("requests_running"), new.total("requests_running")) == (3, 12)
    assert notes(old, engines=4) == {"engines_missing": "3 of 4 engines not exported"}
    assert notes(new, engines=4) == {}


def test_D19_two_caches_that_are_two_fifths_full_are_not_four_fifths_full() -> None:
    """Case D19: ratios are not summed.

    Each engine keeps its own ratio, copies of one figure count once, and a sum is refused.
    """
    two = read("".join(f'vllm:kv_cache_usage_perc{{model_name="m",engine="{rank}"}} 0.4\n' for rank in range(2)))
    assert two.of("kv_cache_usage_ratio") == {("0", ""): 0.4, ("1", ""): 0.4}
    ranks = read("".join(f'vllm:kv_cache_usage_perc{{model_name="m",engine="0",tp_rank="{rank}"}} 0.4\n' for rank in range(2)))
    assert ranks.of("kv_cache_usage_ratio") == {("0", ""): 0.4}
    with pytest.raises(ValueError, match="not summed"):
        two.total("kv_cache_usage_ratio")
    assert {quantity.unit for quantity in QUANTITIES if quantity.name.endswith("_ratio")} == {"1"}


def test_D04_what_does_not_add_up() -> None:
    reading = read(
        "vllm:time_to_first_token_seconds_count 8060\n"
        'vllm:request_success_total{finished_reason="stop"} 7000\n'
        'vllm:request_success_total{finished_reason="length"} 900\n'
        'vllm:request_success_total{finished_reason="abort"} 60\n'
    )
    assert notes(reading)["unaccounted"].startswith("100 requests")


def test_A04_one_counter_for_two_faults_is_reported_as_mixed() -> None:
    mixed = read('vllm:nixl_num_failed_transfers_total{engine="0"} 7\n')
    apart = read('vllm:nixl_num_failed_transfers_total{engine="0"} 3\nvllm:nixl_num_kv_expired_reqs_total{engine="0"} 4\n')
    assert "failures_mixed" in notes(mixed)
    assert "failures_mixed" not in notes(apart)
    assert mixed.total("kv_transfer_failures") == 7
    assert (apart.total("kv_transfer_failures") or 0) + (apart.total("kv_expired_requests") or 0) == 7


def test_A05_failures_without_one_transfer_are_no_rate_of_zero() -> None:
    reading = read('vllm:nixl_num_failed_transfers_total{engine="0"} 17960\n')
    assert "no_transfer_ever" in notes(reading)
    assert not sample(reading).histograms


def test_D10_negative_counters_raise_nothing_and_read_as_zero() -> None:
    reading = read(
        'vllm:prompt_tokens_by_source_total{source="local_compute"} 3809\n'
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} -1\n'
    )
    assert reading.of("prompt_tokens_by_source") == {("", "local_compute"): 3809.0, ("", "local_cache_hit"): 0.0}
    assert reading.invalid == {"negative": 1}


@pytest.mark.parametrize(
    ("value", "reason"),
    [("NaN", "not_finite"), ("+Inf", "not_finite"), ("-Inf", "not_finite"), ("-1", "negative"), ("2147483632", "blank")],
)
def test_a_gauge_that_says_nothing_is_absent(value: str, reason: str) -> None:
    reading = read(f"vllm:num_requests_waiting {value}\n")
    assert (reading.values, reading.invalid) == ({}, {reason: 1})


def test_D12_one_computed_token_a_request_is_no_recompute() -> None:
    def at_decode(computed: int) -> dict[str, str]:
        return notes(
            read(
                f'vllm:prompt_tokens_by_source_total{{source="external_kv_transfer"}} {80_000 - computed}\n'
                f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {computed}\n'
                'vllm:request_success_total{finished_reason="stop"} 10\n'
            ),
            role=Role.DECODE,
        )

    assert "decode_recomputes" not in at_decode(10)
    assert "decode_recomputes" in at_decode(8000)


def test_A10_recomputed_tokens_show_as_local_compute() -> None:
    reading = read(
        'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 8000\n'
        'vllm:prompt_tokens_by_source_total{source="local_compute"} 8010\n'
        'vllm:request_success_total{finished_reason="stop"} 10\n'
    )
    assert "decode_recomputes" in notes(reading, role=Role.DECODE)


def test_D13_a_prefill_without_gaps_is_no_fault() -> None:
    reading = read(
        "vllm:inter_token_latency_seconds_count 0\nvllm:inter_token_latency_seconds_sum 0\n"
        'vllm:request_success_total{finished_reason="length"} 500\nvllm:time_to_first_token_seconds_count 500\n'
    )
    assert notes(reading, role=Role.PREFILL) == {}


def test_D15_the_latest_series_counts_not_the_sum_of_times() -> None:
    reading = read(page("replay/metrics/D15_lora_info.prom"))
    assert reading.of("lora_adapters") == {("", "running"): 1.0, ("", "waiting"): 0.0}
    assert max(value.value for value in sample(reading).values) == 1.0


def test_D16_labels_are_bounded_whatever_the_page_does() -> None:
    reader = PageReader(most_labels=10)
    text = "".join(f'vllm:request_success_total{{finished_reason="{number}"}} 1\n' for number in range(10_000))
    for _ in range(2):
        reading = reader.read(text.encode())
        assert len(reading.of("requests_finished")) == 11
        assert reading.of("requests_finished")[("", OTHER)] == 9990.0
    gauges = "".join(f'vllm:num_requests_waiting_by_reason{{reason="{number}"}} 1\n' for number in range(100))
    assert len(reader.read(gauges.encode()).of("requests_waiting_by_reason")) == 10


def test_D18_growth_is_never_negative() -> None:
    first, second = json.loads(page("replay/metrics/D18_restart_deltas.json"))
    for name, before in first["start"].items():
        assert increase(before, first["end"][name]) == Increase(first["expected"][name], reset=True)
        assert increase(before, second["end"].get(name)) == Increase(None)
    assert increase(5.0, 7.0) == Increase(2.0)


def test_D18_a_counter_that_began_again_is_no_loss() -> None:
    tracks = CounterTracks()
    key = ("prompt_tokens", "0", "")
    assert tracks.follow({key: 1000.0}, EPOCH, None) == frozenset()
    assert tracks.since(key) == EPOCH
    assert tracks.follow({}, EPOCH + 1, None) == frozenset(), "an absent series is a gap"
    assert tracks.follow({key: 200.0}, EPOCH + 9, None) == frozenset({key})
    assert tracks.since(key) == EPOCH + 2, "after the last reading, at which it had not begun again"


def test_D18_two_counts_never_have_one_start() -> None:
    tracks = CounterTracks()
    key = ("prompt_tokens", "0", "")
    tracks.follow({key: 1000.0}, EPOCH, None)
    first = tracks.since(key)
    tracks.follow({key: 7.0}, EPOCH + 5, None)
    assert first < tracks.since(key) <= EPOCH + 5


def test_D25_a_published_page_in_its_own_order() -> None:
    reading = read(page("replay/metrics/D25_sglang_sample.prom"))
    assert reading.count("ttft_seconds") == 11_008
    found = notes(reading)
    assert found["no_first_token"].startswith("220 ")
    assert "1.9%" in found["tokens_without_gap"]
    lines = [note.text for note in page_notes(sample(reading), reading, Expected())]
    assert any(text.startswith("ttft_seconds: 77.2% of its samples lie above its last bucket (30)") for text in lines)


def test_D27_one_agent_of_eight_is_not_the_instance() -> None:
    reading = read(
        'agent_tx_bytes_total{agent_name="a0"} 1e9\nvllm:nixl_bytes_transferred_sum{engine="0"} 8e9\n'
        'vllm:nixl_bytes_transferred_count{engine="0"} 8\n'
    )
    found = notes(reading, agents=8)
    assert found["agents_missing"].startswith("1 of 8 agents visible")
    assert found["agents_disagree"].startswith("the engine counts 8.0 times")
    again = read('agent_tx_bytes_total{agent_name="a3"} 0.2e9\n')
    tracks = CounterTracks()
    assert not tracks.follow(reading.values, EPOCH, None)
    assert not tracks.follow(again.values, EPOCH + 1, None), "another agent is another series, not a counter that fell"


# --- units, copies, reports -----------------------------------------------------------------------------------------------


def test_units_become_base_units() -> None:
    reading = read(
        'sglang:kv_transfer_latency_ms_bucket{le="50"} 1\nsglang:kv_transfer_latency_ms_bucket{le="+Inf"} 2\n'
        "sglang:kv_transfer_latency_ms_sum 150\nsglang:kv_transfer_latency_ms_count 2\nsglang:kv_transfer_total_mb_sum 3\n"
    )
    latency = reading.histograms[("kv_transfer_seconds", "", "sglang")]
    assert latency.total == pytest.approx(0.15)
    assert latency.counts() == ((0.05,), (1, 1))
    assert reading.histograms[("kv_transfer_bytes", "", "sglang")].total == 3 * 2**20


def test_a_unit_that_changed_is_converted_and_reported() -> None:
    text = b"# TYPE vllm:nixl_xfer_time_ms histogram\nvllm:nixl_xfer_time_ms_sum 150\nvllm:nixl_xfer_time_ms_count 2\n"
    assert read(text).histograms[("kv_transfer_seconds", "", "nixl")].total == pytest.approx(0.15)
    assert [(note.state, note.seen) for note in schema_notes(families_of(text))[1] if note.quantity == "kv_transfer_seconds"] == [
        (SchemaState.UNIT_CHANGED, "vllm:nixl_xfer_time_ms")
    ]


def test_a_unit_of_another_dimension_is_another_thing() -> None:
    assert find("vllm:nixl_xfer_time_bytes_sum") is None
    assert split_unit("vllm:nixl_xfer_time_seconds") == ("vllm:nixl_xfer_time", "seconds", False)


def test_ranks_that_tell_the_same_are_not_added_up() -> None:
    copies = "".join(f'sglang:num_transfer_failed_reqs_total{{tp_rank="{rank}"}} 5\n' for rank in range(4))
    assert read(copies).total("kv_transfer_failures") == 5
    ranks = "".join(f'sglang:prompt_tokens_total{{dp_rank="{rank}"}} 5\n' for rank in range(4))
    assert read(ranks).total("prompt_tokens") == 20


def test_a_family_that_only_looks_right_is_named_not_read() -> None:
    text = b"# TYPE vllm:num_request_waiting gauge\nvllm:num_request_waiting 3\n"
    assert read(text).values == {}
    found = [note for note in schema_notes(families_of(text))[1] if note.state is SchemaState.UNKNOWN]
    assert [(note.seen, note.expected) for note in found] == [("vllm:num_request_waiting", "vllm:num_requests_waiting")]


def test_an_engine_without_a_connector_misses_nothing_of_it() -> None:
    text = page("recordings/metrics_decode.txt")
    without = b"\n".join(line for line in text.split(b"\n") if b"nixl" not in line)
    assert schema_notes(families_of(without)) == (("vllm",), ())


@pytest.mark.parametrize("path", sorted((_DATA / "metrics").glob("rebuilt_*.prom")), ids=lambda path: path.name)
def test_pages_of_other_versions_and_engines_give_values(path: Path) -> None:
    reading = read(path.read_bytes())
    assert reading.values
    assert not reading.invalid


@pytest.mark.parametrize("value", ["18446744073709551616", "1e300", "1.7976931348623157e308"])
def test_counts_that_no_engine_reaches_cost_themselves_and_not_the_page(value: str) -> None:
    lines = [f'vllm:e2e_request_latency_seconds_bucket{{engine="0",worker="{n}",le="1"}} {value}' for n in range(2)]
    lines += [f'vllm:e2e_request_latency_seconds_count{{engine="0",worker="{n}"}} {value}' for n in range(2)]
    lines += [f'vllm:prompt_tokens_total{{engine="0",worker="{n}"}} {value}' for n in range(2)]
    reading = read("\n".join([*lines, "vllm:num_requests_running 3", ""]))
    made = metrics_request(Resource(), [sample(reading)])
    assert ExportMetricsServiceRequest.FromString(made).resource_metrics
    assert reading.values["requests_running", "", ""] == 3
    assert reading.invalid["too_large"] == 4
    assert all(math.isfinite(each) for each in reading.values.values())
