"""The engine's metrics that the sidecar exposes: one schema, bounded.

Unknown values are absent.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from builders.records import EPOCH, process
from handrail.metrics.registry import Registry
from handrail.records import EngineSample, LogFact, ProcessEvent, ProcessEventKind, Role, SchemaReport, Source
from handrail.records.quantities import QUANTITIES, QuantityKind
from handrail_sidecar.live_metrics.engine_metrics import EventCounts, engine_rows, log_rows
from handrail_sidecar.sources.engine_log import LogSettings, LogSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings, MetricsSource


def exposed(page: bytes | None) -> str:
    """Return the sidecar's page after it read ``page``."""

    async def take(_: EngineSample | SchemaReport | LogFact) -> bool:
        return True

    events = EventCounts(lambda _: None)
    source = MetricsSource(MetricsSettings(url="http://127.0.0.1:1"), process(Role.DECODE), take, events)
    source.reading = None if page is None else source.reader.read(page)
    text, _ = Registry(engine_rows(source, events)).expose("text/plain")
    return text.decode()


def test_every_quantity_has_a_row_and_the_page_is_valid() -> None:
    families = {family.name for family in text_string_to_metric_families(exposed(b"vllm:num_requests_running 3\n"))}
    for quantity in QUANTITIES:
        if quantity.kind is not QuantityKind.HISTOGRAM:
            assert f"handrail_engine_{quantity.name}" in families


def test_H08_what_is_not_known_is_absent_not_zero() -> None:
    text = exposed(None)
    assert not re.search(r"^handrail_engine_(requests|kv)", text, re.MULTILINE)
    assert "handrail_engine_up 0.0" in text


def test_D07_copies_by_process_are_one_figure_and_no_pid_is_exposed() -> None:
    text = exposed(b'vllm:num_requests_running{pid="4711"} 1\nvllm:num_requests_running{pid="4712"} 1\n')
    assert 'handrail_engine_requests_running{engine=""} 1.0' in text
    assert "pid" not in text


@pytest.mark.parametrize("label", ["model_name", "finished_reason", "engine"])
def test_D16_the_page_stays_small_whatever_labels_the_engine_has(label: str) -> None:
    page = "".join(f'vllm:request_success_total{{{label}="{number}"}} 1\n' for number in range(10_000))
    text = exposed(page.encode())
    assert len(text) < 30_000
    total = sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "handrail_engine_requests_finished_total"
    )
    assert total == 10_000


def test_D22_size_busy_rate_and_wall_rate_have_three_names() -> None:
    text = exposed(
        b'vllm:nixl_bytes_transferred_sum{engine="0"} 4.7e9\nvllm:nixl_bytes_transferred_count{engine="0"} 10\n'
        b'vllm:nixl_xfer_time_seconds_sum{engine="0"} 3.1\nvllm:nixl_xfer_time_seconds_count{engine="0"} 10\n'
    )
    found = {
        s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples if "_kv_transfer" in s.name
    }
    moved, count = found["handrail_engine_kv_transferred_bytes_total"], found["handrail_engine_kv_transfers_total"]
    assert moved / count == 470e6
    assert moved / found["handrail_engine_kv_transfer_busy_seconds_total"] == pytest.approx(1.516e9, rel=1e-3)
    assert "verified" not in text


def test_failure_series_begin_at_zero() -> None:
    async def take(_: object) -> bool:
        return True

    source = LogSource(LogSettings(paths=()), process(Role.DECODE), take)
    text = Registry(log_rows(source)).expose("text/plain")[0].decode()
    for kind in ("fetch_failed", "stale_read", "expired", "engine_dead"):
        assert f'handrail_sidecar_log_facts_total{{kind="{kind}"}} 0.0' in text
    assert 'handrail_engine_process_events_total{kind="hung"} 0.0' in exposed(None)


def test_events_are_counted_on_their_way() -> None:
    process_events: list[ProcessEvent] = []
    events = EventCounts(process_events.append)
    event = ProcessEvent(process=process(Role.DECODE), source=Source.METRICS, at_unix_ns=EPOCH, kind=ProcessEventKind.HUNG)
    events(event)
    assert (process_events, events.counts[ProcessEventKind.HUNG]) == ([event], 1)


async def test_lines_of_the_plugin_and_of_the_file_are_one_fact() -> None:
    got: list[LogFact] = []

    async def take(facts: object) -> bool:
        got.extend(facts)  # type: ignore[arg-type]
        return True

    source = LogSource(LogSettings(paths=()), process(Role.PREFILL), take, now_unix_ns=lambda: EPOCH)
    message = "Releasing expired KV blocks for request cmpl-a-0 which were retrieved by 0 remote worker(s) before lease expired."
    source.say(EPOCH, "WARNING", message)
    source.say(EPOCH + 1, "WARNING", message)
    source.say(EPOCH + 2, "ERROR", "x" * 100_000)
    await source.start()
    await source.shutdown(1)
    (fact,) = got
    assert (fact.request_id, fact.lines, fact.at_unix_ns, fact.level) == ("cmpl-a-0", 2, EPOCH, "WARNING")
