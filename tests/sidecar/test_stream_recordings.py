"""The 18 recorded streams of a real vLLM 0.32 pair, line by line with their times.

The tests check first token, token counts and outcome.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import Outcome
from handrail_sidecar.proxy.response_reader import End, ResponseReader

FOLDER = Path(__file__).parents[1] / "data" / "recordings" / "sse"
STREAMS: list[dict[str, Any]] = [
    json.loads(line) for path in sorted(FOLDER.glob("*.jsonl")) for line in path.read_text().splitlines()
]


def events_of(stream: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Yield the chunk objects with the time of the empty line that completed each.

    It reads them independently of the code under test.
    """
    events, pending = [], ""
    for seconds, line in stream["chunks"]:
        if line.startswith("data: {"):
            pending = line[6:]
        elif not line.strip() and pending:
            events.append((round(seconds * 1e9), json.loads(pending)))
            pending = ""
    return events


def is_token(choice: dict[str, Any]) -> bool:
    if "text" in choice:
        return choice["text"] != "" or choice["finish_reason"] is None
    delta = choice["delta"]
    return bool(delta.get("content")) or ("role" not in delta and choice["finish_reason"] is None)


def test_there_are_eighteen() -> None:
    assert len(STREAMS) == 18
    assert {"messages" in stream["request"] for stream in STREAMS} == {True, False}


@pytest.mark.parametrize("stream", STREAMS, ids=[stream["id"] for stream in STREAMS])
def test_recorded_stream(stream: dict[str, Any]) -> None:
    reader = ResponseReader(
        "chat" if "messages" in stream["request"] else "text_completion",
        choices=1,
        status=200,
        content_type="text/event-stream; charset=utf-8",
        content_encoding=None,
        continuous_usage=False,
    )
    for seconds, line in stream["chunks"]:
        reader.feed(line.encode(), round(seconds * 1e9))
    reader.finish(round(stream["chunks"][-1][0] * 1e9), End.CLEAN)
    facts = reader.facts()

    events = events_of(stream)
    tokens = [at_ns for at_ns, event in events if event["choices"] and is_token(event["choices"][0])]
    texts = [at_ns for at_ns, event in events for c in event["choices"] if c.get("text") or c.get("delta", {}).get("content")]
    usage = next(event["usage"] for _, event in events if not event["choices"])
    assert facts.ttft_token_ns == tokens[0]
    assert (facts.ttft_text_ns, facts.last_content_ns, facts.events) == (texts[0], texts[-1], len(texts))
    assert (facts.prompt_tokens, facts.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (facts.outcome, facts.finish_reasons, facts.hints, facts.lost_events) == (Outcome.OK, ("length",), (), 0)
    assert (facts.response_id, facts.model) == (events[0][1]["id"], "tiny")
    assert facts.itl is None
    gaps = sorted(after - before for before, after in pairwise(texts))
    assert facts.gaps is not None
    assert (facts.gaps.count, facts.gaps.sum_ns, facts.gaps.max_ns) == (len(gaps), sum(gaps), gaps[-1])
    middle = GapSketch.decode(facts.gaps.sketch).quantile(0.5)
    assert middle is not None
    assert abs(middle - gaps[(len(gaps) + 1) // 2 - 1]) <= 0.01 * middle
