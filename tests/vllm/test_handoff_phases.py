"""Compare phases and bytes of 100 good requests with a second observer.

The observer runs inside the engines (``observer/``).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pytest

from handrail.phases import Phase
from handrail_collector.rows import FetchRow, RequestRow
from vllm.client import Request, Result, load, new_traceparent
from vllm.client import prompt as random_words
from vllm.faulty_proxy import read_done
from vllm.figures import Figures, nearest_rank
from vllm.handoffs import MIDDLEWARE, Bed, running_bed
from vllm.observed import metric
from vllm.observer.reference import DOOR, SITE, VARIABLE, Engine, read
from vllm.pair import find_installation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

COUNT = 100
CONCURRENCY = 3
BLOCK_TOKENS = 32
BLOCK_BYTES = 2 * 2 * 2 * 64 * 2 * BLOCK_TOKENS  # layers, K and V, heads, head size, bytes of a number, tokens: make_model.py
ALLOWED_NS = 1_000_000
KV_PHASES = ("kv_wait", "kv_handshake", "kv_transfer", "kv_notice")
TITLE = "phases against the other observer (median of 100 requests)"


def requests() -> list[Request]:
    """Make streams; every fifth begins like the one before it.

    D then has a part of its prompt.
    """
    source = random.Random("phases")
    found: list[Request] = []
    for number in range(COUNT):
        words = random_words(source, (50, 120))
        if number % 5 == 4:
            words = f"{found[-1].prompt} {random_words(source, (10, 40))}"
        found.append(
            Request(
                request_id=f"phase-{number:03d}",
                traceparent=new_traceparent(source),
                chat=number % 10 >= 5,
                stream=True,
                prompt=words,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """The data of both observers about the requests."""

    results: Sequence[Result]
    rows: Mapping[str, RequestRow]
    fetches: Mapping[str, FetchRow]
    prefill: Engine
    decode: Engine
    offered_blocks: Mapping[str, int]  # by P, as the proxy saw them
    nixl_bytes: float  # of D's /metrics, of these requests
    prefix_hits: float  # tokens, of D's /metrics


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with running_bed(find_installation(), tmp_path_factory.mktemp("phases")) as bed:
        for role in ("prefill", "decode"):
            env = {VARIABLE: str(bed.folder / f"{role}.notes")}
            bed.start(role, env=env, sites=(SITE,), middlewares=(MIDDLEWARE, DOOR))
        bed.wait_healthy()
        url = bed.engines["decode"].url
        load(bed.edge_url, [Request(request_id="first", traceparent=None, chat=False, stream=True, prompt="a b c " * 40)], 1)
        names = ("vllm:nixl_bytes_transferred_sum", "vllm:prefix_cache_hits_total")
        before = [metric(url, name) for name in names]
        results = load(bed.edge_url, requests(), CONCURRENCY)
        yield gather(bed, results, [metric(url, name) - b for name, b in zip(names, before, strict=True)])


def gather(bed: Bed, results: Sequence[Result], counted: Sequence[float]) -> Seen:
    names = [str(result.request.request_id) for result in results]

    def whole(rows: dict[str, list[RequestRow]]) -> bool:
        return all(len(rows.get(name, ())) == 1 and phases_of(rows[name][0]) for name in names)

    rows = bed.wait_rows(whole, 40.0)
    done = read_done(bed.control)
    return Seen(
        results=results,
        rows={name: rows[name][0] for name in names},
        fetches={str(fetch.client_request_id): fetch for fetch in bed.fetches()},
        prefill=read(bed.folder / "prefill.notes", (*names, "first")),
        decode=read(bed.folder / "decode.notes", (*names, "first")),
        offered_blocks={name: sum(map(len, done[name]["params"]["remote_block_ids"])) for name in names},
        nixl_bytes=counted[0],
        prefix_hits=counted[1],
    )


def phases_of(row: RequestRow) -> bool:
    """Tell whether a row is decided and has the plugin's data of both engines.

    The data are the times of both engines, what P kept and what D loaded.
    """
    spans = [join.evidence for join in row.joins]
    return row.version > 0 and spans.count("prefill:plugin") == spans.count("decode:plugin") == 2


def phase_rows(row: RequestRow) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for phase in row.phases:
        found[phase.phase] += phase.duration_ns
    return found


def test_every_phase_is_what_the_other_observer_saw(seen: Seen, figures: Figures) -> None:
    errors: dict[str, list[int]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    for name, row in seen.rows.items():
        report = phase_rows(row)
        for phase, length_ns in {**seen.prefill.prefill(name), **seen.decode.decode(name)}.items():
            errors[phase].append(abs(report.get(phase, 0) - length_ns))
            lengths[phase].append(length_ns)
    step_ns = median(lengths["first_step"])
    figures.add(
        TITLE, f"{'phase':18} {'length':>9} {'error p50':>10} {'p90':>8} {'max':>8}  ms; one step of D is {step_ns / 1e6:.2f}"
    )
    for phase, found in errors.items():
        shown = (median(lengths[phase]), median(found), nearest_rank(found, 0.9), max(found))
        figures.add(TITLE, f"{phase:18} " + " ".join(f"{ns / 1e6:{w}.3f}" for ns, w in zip(shown, (9, 10, 8, 8), strict=True)))
    assert {len(found) for found in errors.values()} == {COUNT}
    assert set(errors) >= {p.value for p in Phase} - {"router_and_hops", "router", "prefill_hops", "decode_hops", "unattributed"}
    bad = {phase: median(found) for phase, found in errors.items() if median(found) > max(ALLOWED_NS, step_ns)}
    assert not bad, bad


def test_the_bounds_that_are_stated_hold(seen: Seen, figures: Figures) -> None:
    """The true length of each load phase lies within the stated bound.

    A poll may see the end of a load phase late; the truth comes from the other observer.
    That observer is off by the delay of its own line, so a millisecond more is allowed.
    """
    beyond: dict[str, list[int]] = defaultdict(list)
    for name, row in seen.rows.items():
        parts = {phase.phase: phase for phase in row.phases if phase.process == "decode"}
        for phase, length_ns in seen.decode.decode(name).items():
            if phase in KV_PHASES:
                phase_row = parts[phase]
                beyond[phase].append(max(0, abs(phase_row.duration_ns - length_ns) - phase_row.bound_ns))
    for phase, found in beyond.items():
        held = sum(over_ns <= ALLOWED_NS for over_ns in found)
        p90, worst = nearest_rank(found, 0.9) / 1e6, max(found) / 1e6
        figures.add(
            TITLE, f"{phase:18} within its bound and 1 ms: {held} of {len(found)}; beyond: p90 {p90:.3f}, max {worst:.3f} ms"
        )
    assert set(beyond) == set(KV_PHASES)
    bad = {phase: nearest_rank(found, 0.9) for phase, found in beyond.items() if nearest_rank(found, 0.9) > ALLOWED_NS}
    assert not bad, bad


def test_next_to_nothing_is_unattributed(seen: Seen, figures: Figures) -> None:
    shares = [phase_rows(row)[Phase.UNATTRIBUTED.value] / (row.ttft_token_ns or 1) for row in seen.rows.values()]
    p90, worst = nearest_rank(shares, 0.9), max(shares)
    figures.add(TITLE, f"unattributed: {median(shares):.2%} of TTFT at the median, p90 {p90:.2%}, most {worst:.2%}")
    assert median(shares) < 0.02
    for row in seen.rows.values():
        assert sum(phase.duration_ns for phase in row.phases) == row.ttft_token_ns


def test_bytes_are_nixls_and_those_of_the_blocks(seen: Seen, figures: Figures) -> None:
    wrong = []
    for name in seen.rows:
        fetch, theirs = seen.fetches[name], seen.decode.transfers[name]
        blocks = seen.offered_blocks[name] - (fetch.tokens_local or 0) // BLOCK_TOKENS
        if {fetch.bytes_moved, fetch.bytes_expected, theirs.bytes} != {
            blocks * BLOCK_BYTES
        } or theirs.descriptors != fetch.descriptors:
            wrong.append((name, fetch.bytes_moved, fetch.bytes_expected, theirs.bytes, blocks * BLOCK_BYTES))
    moved = sum(seen.fetches[name].bytes_moved or 0 for name in seen.rows)
    local = sum(seen.fetches[name].tokens_local or 0 for name in seen.rows)
    hits = sum(bool(seen.fetches[name].tokens_local) for name in seen.rows)
    right = len(seen.rows) - len(wrong)
    title = "bytes of the hand-offs"
    figures.add(
        title, f"{right} of {len(seen.rows)} equal NIXL's telemetry of that transfer, and blocks x block bytes - local hits"
    )
    figures.add(title, f"{moved} bytes in all, NIXL's counter says {seen.nixl_bytes:.0f}")
    figures.add(title, f"{hits} with local hits, {local} tokens, vLLM's counter says {seen.prefix_hits:.0f}")
    assert not wrong, wrong[:5]
    assert moved == seen.nixl_bytes
    assert hits
    assert local == seen.prefix_hits
