"""The engine's own figures on the sidecar's page: first tokens, fetches, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from builders.exchanges import PROCESS
from builders.plugin import fetch, happened
from handrail.metrics.registry import HistogramDef, Registry
from handrail.plugin import events as words
from handrail.plugin.events import FIELDS
from handrail.records import ENGINE_LOST, FetchEffect, Observation, Outcome, ProcessEvent, ProcessEventKind, Role, Source
from handrail_sidecar.live_metrics.plugin_metrics import plugin_rows
from handrail_sidecar.live_metrics.requests import LiveRequests
from handrail_sidecar.live_metrics.slo import RequestObjectives
from handrail_sidecar.plugin_merge.handoff_counters import REASONS
from handrail_sidecar.sources.datagram import Packet, PluginDatagramEvent
from handrail_sidecar.sources.plugin_socket import PluginSource, Restarts

MS, S = 10**6, 10**9
UNIX = 1_800_000_000 * S
_DEFAULTS: dict[str, Any] = {"b": False, "i": 0}
K = ProcessEventKind


class Engine:
    """A plugin source without a socket: the test gives it the plugin's events.

    Times are in ns on the monotonic clock.
    """

    def __init__(self) -> None:
        self.now = 0
        self.live = LiveRequests(Role.DECODE, RequestObjectives(), wall=lambda: UNIX)
        self.records: list[Observation] = []
        self.source = PluginSource(Path("nowhere"), PROCESS, self.records.append, live=self.live, clock=lambda: self.now)
        self._sequence = 0

    def say(self, at: int, name: str, **fields: Any) -> None:
        wanted = {field: fields.pop(field, _DEFAULTS.get(kind)) for field, kind in FIELDS[name].items()}
        assert not fields
        self._sequence += 1
        packet = Packet("core", 7, words.CORE, self._sequence, at, UNIX + at, 0, (PluginDatagramEvent(name, at, wanted),))
        self.source._say(self.source.merge.take(packet, 7))

    def page(self, hung_s: float = 60) -> dict[tuple[str, ...], float]:
        page = Registry(plugin_rows(self.source, round(hung_s * S), monotonic_ns=lambda: self.now)).expose("text/plain")[0]
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(page.decode())
            for sample in family.samples
        }


def test_the_first_token_counts_when_the_scheduler_tells_it_and_once() -> None:
    engine = Engine()
    engine.say(1 * S, "queued", request="r", prompt_tokens=4)
    engine.say(1 * S + 80 * MS, "first_token", request="r")
    engine.say(1 * S + 90 * MS, "first_token", request="r")
    engine.say(1 * S + 95 * MS, "first_token", request="of-nobody")
    ((labels, histogram),) = engine.live.ttft.items()
    assert (labels, histogram.count, histogram.total) == (("unknown", "decode", "engine"), 1, 80 * MS)


def test_the_middlewares_exchanges_are_counted_live_and_the_engines_are_not() -> None:
    engine = Engine()
    headers = {"content-type": ["application/json"]}
    body = '{"model":"m","prompt":"p","stream":true}'
    engine.say(
        1 * S,
        "http_request",
        exchange=1,
        arrival_ns=1 * S,
        method="POST",
        path="/v1/completions",
        headers=headers,
        body_bytes=len(body),
    )
    engine.say(1 * S, "http_part", exchange=1, part=body, tail=False)
    engine.say(1 * S, "queued", request="r", prompt_tokens=4)
    engine.say(1 * S, "http_head", exchange=1, status=200, content_type="text/event-stream")
    chunk = 'data: {"id":"cmpl-x","model":"m","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    engine.say(1 * S + 90 * MS, "http_body", exchange=1, part=chunk)
    engine.say(1 * S + 115 * MS, "http_body", exchange=1, part=chunk)
    assert list(engine.source.open_since()) == [1 * S]
    assert {labels: each.total for labels, each in engine.live.ttft.items()} == {("m", "decode", "decode"): 90 * MS}
    assert {labels: each.total for labels, each in engine.live.gaps.items()} == {("m", "decode"): 25 * MS}
    engine.say(2 * S, "finished", request="r", status="FINISHED_ABORTED")
    engine.say(2 * S, "http_end", exchange=1, ending="client_gone")
    assert {key: count for key, count in engine.live.outcomes.items() if count} == {("m", Outcome.CLIENT_DISCONNECT): 1}


@pytest.mark.parametrize(("status", "outcome"), [("FINISHED_STOPPED", Outcome.OK), ("FINISHED_ERROR", Outcome.STREAM_ERROR)])
def test_requests_end_as_the_scheduler_says(status: str, outcome: Outcome) -> None:
    engine = Engine()
    engine.say(1 * S, "queued", request="r", prompt_tokens=4)
    assert list(engine.source.open_since()) == [1 * S]
    engine.say(2 * S, "finished", request="r", status=status)
    assert list(engine.source.open_since()) == []
    assert engine.live.outcomes["unknown", outcome] == 1


def test_a_fetch_that_is_open_for_long_is_counted_as_hung_while_it_hangs() -> None:
    engine = Engine()
    engine.say(1 * S, "queued", request="r", prompt_tokens=96)
    engine.say(
        1 * S,
        "kv_known",
        request="r",
        connector="Pull",
        engine_id="D",
        peer_engine_id="P",
        peer_request_id="p",
        direction="p_to_d",
    )
    for now_s, expected in ((2, (1.0, 0.0, 1.0)), (60, (1.0, 0.0, 59.0)), (61, (1.0, 1.0, 60.0))):
        engine.now = now_s * S
        page = engine.page()
        found = [
            page[name,]
            for name in ("handrail_kv_fetches_open", "handrail_kv_fetches_hung", "handrail_kv_fetch_oldest_age_seconds")
        ]
        assert found == pytest.approx(expected)
    engine.say(62 * S, "finished", request="r", status="FINISHED_ABORTED")
    engine.now = 62 * S
    page = engine.page()
    assert (page["handrail_kv_fetches_open",], page["handrail_kv_fetches_hung",]) == (0.0, 0.0)


def test_times_and_sizes_of_fetches() -> None:
    engine = Engine()
    tally = engine.source.hand_offs
    tally.take(fetch(0, posted_ms=11, done_ms=77))
    tally.take(fetch(0, posted_ms=None, done_ms=None, bytes_moved=None, failure="handshake_failed", ranks_done=0))
    tally.take(fetch(0, posted_ms=20, done_ms=None, bytes_moved=None, request_status=ENGINE_LOST))
    assert {labels: (each.count, each.total) for labels, each in tally.seconds.items()} == {("ok",): (1, 66 * MS)}
    assert (tally.waits.count, tally.waits.total) == (2, 31 * MS)
    assert (tally.sizes.count, tally.sizes.total) == (1, 64 * 32768)
    page = engine.page()
    assert page["handrail_kv_fetch_seconds_count", "ok"] == 1
    assert page["handrail_kv_fetch_wait_seconds_sum",] == pytest.approx(0.031)


@pytest.mark.parametrize("reason", ["", *REASONS])
def test_H01_the_first_failure_of_every_known_type_is_an_increase_and_leads_to_its_trace(reason: str) -> None:
    engine, series = Engine(), ("handrail_kv_fetches_total", *sorted(("failed", reason)))
    assert engine.page()[series] == 0
    lost = fetch(0, failure=reason or None, done_ms=None, ranks_done=0, effect=FetchEffect.FAILED, trace="t9")
    engine.source.hand_offs.take(lost)
    assert engine.page()[series] == 1
    modern = Registry(plugin_rows(engine.source, S)).expose("application/openmetrics-text")[0].decode()
    lines = [line for line in modern.splitlines() if lost.ids.trace_id in line]
    assert len(lines) == 1
    assert lines[0].startswith(f'handrail_kv_fetches_total{{outcome="failed",reason="{reason}"}} 1.0 # {{trace_id=')


def test_every_histogram_of_the_plugin_says_what_its_buckets_are_worth() -> None:
    rows = [row for row in plugin_rows(Engine().source, S) if isinstance(row, HistogramDef)]
    assert len(rows) == 3
    assert all("Buckets" in row.help for row in rows)


@pytest.mark.parametrize(
    ("kinds", "restarts"),
    [
        pytest.param([K.STARTED], 0, id="first-start"),
        pytest.param([K.STARTED, K.RESTARTED], 1, id="replaced-while-silent"),
        pytest.param([K.STARTED, K.DEAD, K.STARTED], 1, id="died-and-came-back"),
        pytest.param([K.STARTED, K.STOPPED, K.STARTED, K.DEAD, K.STARTED], 2, id="twice"),
        pytest.param([K.STARTED, K.STARTED], 0, id="two-ranks"),
        pytest.param([K.STARTED, K.STARTED, K.DEAD, K.DEAD, K.STARTED, K.STARTED], 2, id="two-ranks-restart"),
        pytest.param([K.STARTED, K.HUNG, K.RECOVERED], 0, id="hung"),
    ],
)
def test_restarts(kinds: list[ProcessEventKind], restarts: int) -> None:
    found = Restarts()
    for kind in kinds:
        found.take(happened(kind, Role.DECODE, 0))
    found.take(ProcessEvent(process=PROCESS, source=Source.PLUGIN, at_unix_ns=0, kind=K.RESTARTED, process_kind="worker"))
    assert found.count == restarts
