"""Reported faults as whole logs show them: lines in, facts out."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from builders.records import process
from handrail.records import FAILED_FETCH_KINDS, LineClock, LogFact, LogKind, Role, Source
from handrail_sidecar.engine_logs.aggregate import Folder, FoldSettings
from handrail_sidecar.engine_logs.line_header import read_head
from handrail_sidecar.engine_logs.lines import recognise

_LOGS = Path(__file__).parents[2] / "data/replay/logs"
_RECORDINGS = Path(__file__).parents[2] / "data/recordings"
_NEAR = int(datetime(2026, 11, 29, 12, tzinfo=timezone.utc).timestamp()) * 10**9
S = 10**9


class Replay:
    """A folder fed with lines as the source feeds it."""

    def __init__(self, settings: FoldSettings | None = None, near: int = _NEAR) -> None:
        self.folder = Folder(process(Role.DECODE), Source.LOG, settings)
        self.near = near

    def feed(self, *lines: str, now: int | None = None) -> list[LogFact]:
        for text in lines:
            head = read_head(text, self.near, timezone.utc)
            line = recognise(head.message)
            if line is None:
                self.folder.continued(head)
            else:
                self.folder.add(head, line, now or self.near)
        return list(self.folder.take(now or self.near, all_of_them=True))


def lines(name: str) -> list[str]:
    return (_LOGS / name).read_text(encoding="utf-8").splitlines()


def of(facts: list[LogFact], kind: LogKind) -> list[LogFact]:
    return [fact for fact in facts if fact.kind is kind]


def test_A01_eight_requests_read_too_late_not_sixty_four() -> None:
    facts = Replay().feed(*lines("A01_prefill_expiry.log"))
    expired, stale = of(facts, LogKind.EXPIRED), of(facts, LogKind.STALE_READ)
    assert len(facts) == 16
    assert len(expired) == len(stale) == 8
    assert len({fact.request_id for fact in stale}) == 8
    for fact in stale:
        assert fact.lines == 8
        assert fact.ranks == tuple(f"Worker_TP{rank}" for rank in range(8))
        assert dict(fact.numbers)["since_expiry_s"] == 21.0


def test_A01_the_old_wording_is_the_same_kind() -> None:
    facts = Replay().feed(*lines("A01_prefill_expiry_oldwording.log"))
    assert [fact.kind for fact in facts] == [LogKind.EXPIRED] * 3
    assert all(dict(fact.numbers) == {"readers": 0.0, "timeout_s": 120.0} for fact in facts)


def test_A05_telemetry_off_is_reported() -> None:
    text = "W nixl_agent.cpp:215] NIXL telemetry is disabled; ignoring telemetry requested through agent config"
    (fact,) = Replay().feed(text)
    assert (fact.kind, fact.level, fact.clock) == (LogKind.TELEMETRY_OFF, "WARNING", LineClock.RECEIPT)


def test_A07_context_is_parsed_and_none_is_no_id() -> None:
    handshake, without_id, setup = Replay().feed(*lines("A07_failure_context.log"))
    assert (handshake.kind, handshake.request_id) == (LogKind.HANDSHAKE_FAILED, "cmpl-aaaa-0-1a2b3c4d")
    assert (handshake.engine_id, handshake.peer_engine_id, handshake.peer) == ("E-D", "E-P", "host-p:5600")
    assert handshake.peer_request_id == "cmpl-aaaa-0-9f8e7d6c"
    assert (dict(handshake.numbers)["blocks"], dict(handshake.numbers)["peer_blocks"]) == (211.0, 113.0)
    assert (without_id.kind, without_id.request_id, without_id.peer_engine_id) == (LogKind.HANDSHAKE_FAILED, None, "E-P")
    assert (setup.kind, setup.failure) == (LogKind.FETCH_FAILED, "transfer_setup_failed")
    assert dict(setup.numbers)["peer_rank"] == 0.0


def test_A10_recomputed_requests_are_counted_although_no_line_names_them() -> None:
    replay = Replay()
    (fact,) = replay.feed(
        "(EngineCore pid=1) WARNING 09-22 13:28:53 [s.py:1] Recovered from KV load failure: 1 request(s) rescheduled"
    )
    assert (fact.kind, dict(fact.numbers), replay.folder.stats.recomputed) == (LogKind.RECOMPUTED, {"requests": 1.0}, 1)


@pytest.mark.parametrize(("end", "kinds"), [("P", ["link_error", "peer_lost", "fetch_failed"]), ("D", ["fetch_failed"])])
def test_A13_each_end_names_its_failed_request_and_what_came_before(end: str, kinds: list[str]) -> None:
    facts = Replay().feed(*(line[2:] for line in lines("A13_mooncake_timeout.log") if line.startswith(end)))
    assert [fact.kind.value for fact in facts] == kinds
    failed = facts[-1]
    assert failed.request_id == "r1"
    assert failed.inferred == tuple(fact.fact_id for fact in facts[:-1])


def test_A16_a_dead_link_is_reported_from_its_first_line_on() -> None:
    text = "(Worker_TP{rank} pid=1) ERROR 09-22 13:28:{second:02} [w.py:1] nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT"
    replay = Replay()
    (first,) = replay.feed(text.format(rank=0, second=1))
    (again,) = replay.feed(*(text.format(rank=rank, second=2) for rank in range(4)))
    assert (first.kind, first.reason) == (LogKind.PEER_LOST, "NIXL_ERR_REMOTE_DISCONNECT")
    assert (again.fact_id, again.at_unix_ns, again.lines, again.revision) == (first.fact_id, first.at_unix_ns, 5, 1)


def test_A17_sixty_requests_expire_in_one_second_and_the_engine_errs() -> None:
    facts = Replay().feed(*lines("A17_expiry_burst.log"))
    assert len(of(facts, LogKind.EXPIRED)) == 60
    (error,) = of(facts, LogKind.ENGINE_ERROR)
    assert error.request_id == "cmpl-11111111-2222-4333-8444-000000000100-0"
    assert error.at_unix_ns - facts[0].at_unix_ns == S


def test_A19_the_lines_of_a_replaced_producer() -> None:
    facts = Replay().feed(
        "UCX AM send failed with status -80 (Endpoint timeout)",
        "nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT",
        "(Worker pid=3) WARNING 11-29 10:00:00 [b.py:1] Local NIXL metadata for remote engine E1 was invalidated; "
        "re-handshaking after reads drain.",
    )
    assert [fact.kind for fact in facts] == [LogKind.LINK_ERROR, LogKind.PEER_LOST, LogKind.PEER_REPLACED]
    assert facts[0].reason == "endpoint_timeout"
    assert facts[2].peer_engine_id == "E1"


def test_A25_twelve_slices_are_two_incidents_and_one_failed_request() -> None:
    near = int(datetime(2025, 12, 20, tzinfo=timezone.utc).timestamp()) * S
    replay = Replay(near=near)
    facts = replay.feed(*lines("A25_mooncake_slices.log"))
    slices, failed = of(facts, LogKind.LINK_ERROR), of(facts, LogKind.FETCH_FAILED)
    assert [(dict(fact.words)["nic"], dict(fact.words)["peer_nic"], fact.lines) for fact in slices] == [
        ("mlx5_0", "mlx5_1", 6),
        ("mlx5_1", "mlx5_0", 6),
    ]
    assert all(fact.peer == "peer-d:15001" and dict(fact.numbers)["retries"] == 2.0 for fact in slices)
    assert len(failed) == replay.folder.stats.fetches_failed == 1
    assert failed[0].inferred == tuple(fact.fact_id for fact in slices)
    years = {datetime.fromtimestamp(fact.at_unix_ns / S, timezone.utc).year for fact in facts}
    assert years == {2025}


def test_A25_a_retry_alone_is_no_failure() -> None:
    replay = Replay()
    (fact,) = replay.feed("Transfer incomplete, retrying... (attempt 1/3)")
    assert (fact.kind, replay.folder.stats.fetches_failed) == (LogKind.TRANSFER_RETRIED, 0)


def test_B01_the_transport_is_that_of_the_data_path() -> None:
    lanes, no_nvlink = Replay().feed(*lines("B01_ucx_lanes.log"))
    assert dict(lanes.words) == {"transport": "tcp", "nic": "eth1", "reach": "intra-node"}
    assert no_nvlink.kind is LogKind.TRANSPORT


def test_B05_and_D20_the_periodic_line_in_base_units() -> None:
    (fact,) = Replay().feed(*lines("B05_kv_line_descriptors.log"))
    numbers = dict(fact.numbers)
    assert numbers["avg_bytes"] == pytest.approx(4806.6 * 2**20)
    assert numbers["avg_post_s"] / numbers["avg_transfer_s"] == pytest.approx(0.726, abs=1e-3)
    assert numbers["avg_descriptors"] == 112_000


def test_D20_zeros_of_a_failure_only_interval_are_left_out_and_unknown_keys_kept() -> None:
    good, failures = Replay().feed(*lines("D20_kv_line.log"))
    assert dict(good.numbers)["avg_transfer_s"] == pytest.approx(0.009862)
    assert "failed_transfers" not in dict(good.numbers)
    assert dict(failures.numbers) == {"transfers": 0.0, "failed_transfers": 3.0}
    (odd,) = Replay().feed("KV Transfer metrics: Num successful transfers=1, New thing (us)=7.5, Name=x")
    assert dict(odd.numbers) == {"transfers": 1.0, "new_thing__us": 7.5}


def test_B13_six_lookups_of_one_request_are_one_wait() -> None:
    (fact,) = Replay().feed(*lines("B13_lmcache_repeat.log"))
    assert (fact.lines, fact.last_unix_ns - fact.at_unix_ns) == (6, 252_000_000)
    assert dict(fact.numbers)["hit_tokens"] == 5000.0


def test_B22_queues_by_name_per_rank() -> None:
    facts = of(Replay().feed(*lines("B22_bootstrap_queue.log")), LogKind.QUEUE_STATS)
    numbers = [dict(fact.numbers) for fact in facts]
    assert sum(each.get("unbootstrapped_reqs", 0) for each in numbers) == 5454
    assert sum(each.get("transferring_reqs", 0) for each in numbers) == 2508
    assert sum(each.get("rate_mb_s", 0) for each in numbers) == pytest.approx(77.72)


_FAILURE = (
    "({worker} pid=7) ERROR 11-29 10:00:00 [base_worker.py:1260] NIXL transfer failure: transfer_setup_failed. Marking blocks as "
    "invalid | Context: {{'failure_type': 'transfer_setup_failed', 'request_id': 'cmpl-a-0-00000001', 'engine_id': 'E-D'}}"
)


def test_the_last_line_of_a_traceback_is_the_reason() -> None:
    head = "(Worker pid=7) ERROR 11-29 10:00:00 [base_worker.py:1260] "
    (fact,) = Replay().feed(
        _FAILURE.format(worker="Worker"),
        head + "Traceback (most recent call last):",
        head + '  File "x.py", line 3, in f',
        head + "    raise ValueError('a prompt')",
        head + "nixl_cu12._bindings.nixlRemoteDisconnectError: NIXL_ERR_REMOTE_DISCONNECT",
    )
    # The exception's own line also matches a row: it stays with its statement.
    assert fact.reason == "NIXL_ERR_REMOTE_DISCONNECT"


def test_one_request_that_fails_by_several_lines_counts_once() -> None:
    replay = Replay()
    facts = replay.feed(
        _FAILURE.format(worker="Worker_TP0"),
        _FAILURE.format(worker="Worker_TP1"),
        "(EngineCore pid=1) ERROR 11-29 10:00:01 [s.py:1] Failing 1 request(s) due to KV load failure (failure_policy=fail, "
        "120 tokens affected). Request IDs: {'cmpl-a-0-00000001'}",
    )
    assert [(fact.kind, fact.lines) for fact in facts] == [(LogKind.FETCH_FAILED, 2), (LogKind.REQUEST_FAILED_BY_KV, 1)]
    assert replay.folder.stats.fetches_failed == 1


def test_a_real_decode_log_with_two_failed_loads_and_vllms_own_clean_up() -> None:
    """A decode log of vLLM 0.32 with two failed loads and three lines of its clean-up.

    The loads fail because block ids are out of range, and because a peer does not exist.
    """
    replay = Replay()
    facts = replay.feed(*(_RECORDINGS / "log_decode.txt").read_text(encoding="utf-8").splitlines())
    failed = [fact for fact in facts if fact.request_id and fact.kind in FAILED_FETCH_KINDS]
    assert [(fact.kind.value, fact.failure, fact.reason) for fact in failed] == [
        ("fetch_failed", "transfer_setup_failed", "NIXL_ERR_INVALID_PARAM"),
        ("request_failed_by_kv", None, None),
        ("handshake_failed", "handshake_failed", "Again"),
        ("fetch_failed", None, None),  # a line that reports only the failure
        ("request_failed_by_kv", None, None),
    ]
    assert len({fact.request_id for fact in failed}) == 2
    assert replay.folder.stats.fetches_failed == 2
    (own,) = of(facts, LogKind.NOTIFICATION_FAILED)
    assert own.peer_request_id == failed[2].peer_request_id
    assert failed[0].ranks == ("Worker",)


def test_a_real_prefill_log_with_blocks_nobody_read() -> None:
    facts = Replay().feed(*(_RECORDINGS / "log_prefill.txt").read_text(encoding="utf-8").splitlines())
    assert [fact.request_id for fact in of(facts, LogKind.EXPIRED)] == ["cmpl-nobody-0-86db8f63", "cmpl-late-0-8ba3b376"]
    expired = [dict(fact.numbers)["expired_requests"] for fact in of(facts, LogKind.TRANSFER_STATS)]
    assert sum(expired) == 2
    assert not [fact for fact in facts if fact.kind in FAILED_FETCH_KINDS or fact.kind is LogKind.ENGINE_DEAD]


def test_reading_a_log_again_makes_the_same_facts() -> None:
    once = Replay().feed(*lines("A01_prefill_expiry.log"))
    again = Replay().feed(*lines("A01_prefill_expiry.log"))
    assert once == again


def test_updates_wait_and_new_facts_do_not() -> None:
    folder = Folder(process(Role.DECODE), Source.LOG)
    head = read_head("Sync batch data transfer timeout", _NEAR, timezone.utc)
    line = recognise(head.message)
    assert line is not None
    folder.add(head, line, _NEAR)
    assert [fact.lines for fact in folder.take(_NEAR)] == [1]
    folder.add(head, line, _NEAR + S)
    assert list(folder.take(_NEAR + S)) == []
    assert [(fact.lines, fact.revision) for fact in folder.take(_NEAR + 5 * S)] == [(2, 1)]
    folder.add(head, line, _NEAR + 90 * S)
    (later,) = folder.take(_NEAR + 90 * S)
    assert (later.lines, later.revision) == (1, 0), "quiet for a minute: another trouble"


def test_a_clock_that_is_set_back_holds_no_update_and_one_line_ahead_takes_no_later_ones() -> None:
    folder = Folder(process(Role.DECODE), Source.LOG)
    head = read_head("Sync batch data transfer timeout", _NEAR, timezone.utc)
    line = recognise(head.message)
    assert line is not None
    ahead = _NEAR + 70 * 365 * 86_400 * S
    folder.add(head, line, ahead)
    assert [fact.lines for fact in folder.take(ahead)] == [1]
    folder.add(head, line, ahead + S)
    assert [fact.lines for fact in folder.take(_NEAR)] == [2]
    folder.add(head, line, _NEAR)
    assert [(fact.at_unix_ns, fact.lines) for fact in folder.take(_NEAR)] == [(_NEAR, 1)]


def test_state_and_rate_are_bounded() -> None:
    replay = Replay(FoldSettings(most_facts=10, most_facts_per_second=50))
    text = "Releasing expired KV blocks for request cmpl-{} which were retrieved by 0 remote worker(s) before lease expired."
    facts = replay.feed(*(text.format(number) for number in range(200)))
    assert (len(facts), replay.folder.stats.dropped, replay.folder.stats.evicted) == (50, 150, 40)
    assert replay.folder.stats.lines[LogKind.EXPIRED] == 200
