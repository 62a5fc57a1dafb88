"""What consecutive scrapes show about the engine's process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from builders.records import EPOCH, process
from handrail.records import ProcessEvent, ProcessEventKind, Role
from handrail.records.quantities import BY_NAME, QuantityKind
from handrail_sidecar.engine_metrics.counters import CounterTracks
from handrail_sidecar.engine_metrics.liveness import Progress, ProgressSettings
from handrail_sidecar.engine_metrics.page import PageReader

S = 10**9
K = ProcessEventKind


class Watched:
    """One endpoint, scraped at times given in seconds."""

    def __init__(self) -> None:
        self.progress = Progress(process(Role.DECODE), ProgressSettings())
        self.reader, self.tracks = PageReader(), CounterTracks()

    def page(self, at_s: float, text: str, open_requests: int | None = None) -> list[ProcessEvent]:
        at = EPOCH + round(at_s * S)
        reading = self.reader.read(text.encode())
        started = max(reading.of("start_time_seconds").values(), default=None)
        counters = {key: value for key, value in reading.values.items() if BY_NAME[key[0]].kind is QuantityKind.COUNTER}
        reset = self.tracks.follow(counters, at, None if started is None else round(started * S))
        return list(self.progress.seen(reading, at, reset, open_requests))

    def down(self, at_s: float) -> list[ProcessEvent]:
        return list(self.progress.failed(EPOCH + round(at_s * S), "connection refused"))


def vllm(
    steps: int = 5, running: int = 0, waiting: int = 0, tokens: int = 100, engine: str = "0", start: float | None = None
) -> str:
    created = "" if start is None else f'vllm:generation_tokens_created{{engine="{engine}"}} {start}\n'
    return (
        f'vllm:iteration_tokens_total_count{{engine="{engine}"}} {steps}\n'
        f'vllm:generation_tokens_total{{engine="{engine}"}} {tokens}\n'
        f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} {waiting}\n{created}'
    )


def kinds(events: Iterable[ProcessEvent]) -> list[ProcessEventKind]:
    return [event.kind for event in events]


def test_an_engine_whose_core_stopped_hangs_while_its_page_answers() -> None:
    watched = Watched()
    watched.page(0, vllm(steps=4))
    watched.page(5, vllm(steps=5, running=3))
    assert kinds(event for at in range(10, 35, 5) for event in watched.page(at, vllm(steps=5, running=3))) == []
    assert not watched.progress.hung
    (hung,) = watched.page(35, vllm(steps=5, running=3))
    assert watched.progress.hung
    assert (hung.kind, hung.at_bound_ns) == (K.HUNG, 30 * S)
    assert "3 running" in hung.detail
    assert watched.page(40, vllm(steps=5, running=3)) == [], "told once"
    assert kinds(watched.page(45, vllm(steps=6, running=3))) == [K.RECOVERED]
    assert watched.page(50, vllm(steps=6)) == []


def test_an_idle_engine_does_not_hang() -> None:
    watched = Watched()
    assert [event for at in range(0, 600, 5) for event in watched.page(at, vllm())] == []


def test_work_that_begins_after_a_long_rest_has_its_time() -> None:
    watched = Watched()
    watched.page(0, vllm())
    assert watched.page(1000, vllm(waiting=1)) == []


def test_gauges_that_stay_idle_are_contradicted_by_our_own_proxy() -> None:
    """The proxy's counts contradict gauges that stay idle.

    The core was stopped while idle: its last numbers show idle for ever.
    """
    watched = Watched()
    assert [event for at in range(0, 30, 5) for event in watched.page(at, vllm(), open_requests=2)] == []
    assert kinds(watched.page(30, vllm(), open_requests=2)) == [K.HUNG]


def test_a_request_whose_kv_is_on_its_way_is_no_hang() -> None:
    watched = Watched()
    text = vllm(waiting=2) + 'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 2\n'
    assert [event for at in range(0, 300, 5) for event in watched.page(at, text, open_requests=2)] == []


def test_one_rank_of_two_hangs() -> None:
    watched = Watched()
    events = [
        event
        for at in range(0, 40, 5)
        for event in watched.page(at, vllm(steps=5, running=1) + vllm(steps=at, running=1, engine="1"), open_requests=2)
    ]
    assert [(event.kind, "(engine 0)" in event.detail) for event in events] == [(K.HUNG, True)]


@pytest.mark.parametrize("start", [None, 1.0], ids=["without_start_time", "with_start_time"])
def test_D18_a_restart_is_seen_by_counters_and_by_the_start_time(start: float | None) -> None:
    watched = Watched()
    base = EPOCH / S
    watched.page(0, vllm(tokens=500, start=start and base - 100))
    (event,) = watched.page(5, vllm(tokens=3, steps=1, start=start and base + 3))
    assert event.kind is K.RESTARTED
    assert "counters restarted" in event.detail
    assert ("counts since" in event.detail) == (start is not None)


def test_a_restart_before_anything_was_counted_shows_in_the_start_time() -> None:
    watched = Watched()
    watched.page(0, vllm(tokens=0, steps=0, start=EPOCH / S - 100))
    assert kinds(watched.page(5, vllm(tokens=0, steps=0, start=EPOCH / S + 3))) == [K.RESTARTED]


def test_A14_transfers_that_never_end_are_stuck_without_any_failure() -> None:
    watched = Watched()

    def sglang(queue: int, transfer: int = 37) -> str:
        return (
            f"sglang:num_running_reqs 1\nsglang:num_queue_reqs {queue}\nsglang:token_usage 0.04\n"
            f"sglang:num_decode_transfer_queue_reqs {transfer}\nsglang:num_transfer_failed_reqs_total 0\n"
        )

    assert [event for at in range(0, 60, 5) for event in watched.page(at, sglang(at))] == []
    (stuck,) = watched.page(60, sglang(400))
    assert stuck.kind is K.TRANSFERS_STUCK
    assert stuck.detail == "37 requests in transfer, none done or failed for 60 s, while the queue grew from 0 to 400"
    assert kinds(watched.page(65, sglang(400, transfer=36))) == [K.TRANSFERS_MOVING]


def test_transfers_that_stand_still_without_a_queue_are_not_called_stuck() -> None:
    watched = Watched()
    text = "sglang:num_queue_reqs 0\nsglang:num_decode_transfer_queue_reqs 3\n"
    assert [event for at in range(0, 600, 5) for event in watched.page(at, text)] == []


def test_one_missed_scrape_is_nothing_and_two_are_reported_once() -> None:
    watched = Watched()
    watched.page(0, vllm())
    assert watched.down(5) == []
    assert watched.page(10, vllm()) == []
    assert [kinds(watched.down(at)) for at in (15, 20, 25)] == [[], [K.UNREACHABLE], []]
    assert kinds(watched.page(30, vllm())) == [K.REACHABLE]


def test_a_router_page_has_nothing_that_could_hang() -> None:
    watched = Watched()
    text = 'vllm_router_pd_requests_total{route="/v1/completions"} 5\n'
    assert [event for at in range(0, 600, 5) for event in watched.page(at, text, open_requests=3)] == []


def test_an_engine_that_answers_no_more_is_not_reported_as_hung_behind_its_page() -> None:
    watched = Watched()
    for at in range(0, 45, 5):
        watched.page(at, vllm(steps=5, running=3))
    assert watched.progress.hung
    watched.down(45)
    watched.down(50)
    assert not watched.progress.hung
