"""The load of a virtual fleet: arrivals and lengths from a seed or a trace.

Trace formats: Azure's ``TIMESTAMP,ContextTokens,GeneratedTokens`` and Mooncake's lines of JSON (``tests/data/LICENCES.md``).
Both carry only lengths. Mooncake's also has the 512-token blocks of each prompt, so that prefix caches can hit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random

from handrail_sim.emulator.kv import PREFIX_TOKENS
from handrail_sim.emulator.noise import uniform
from handrail_sim.emulator.scenario import Scenario

_PREFILL, _DECODE = 1, 2  # the purposes of draws


class TraceError(ValueError):
    """The trace cannot be read; the message says which line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival, ``at_ns`` from the start of the run.

    ``blocks``: ids of the prompt's leading 512-token blocks, as far as they are known.
    ``answer_blocks``: the blocks that follow once it is answered. The turns of one ``conversation`` go to the same hosts.
    """

    at_ns: int
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    answer_blocks: tuple[int, ...] = ()
    conversation: int | None = None


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request with its hosts.

    Its number or its conversation's number decides the hosts, so that no fault changes them.
    """

    index: int
    arrival: Arrival
    prefill_host: str
    decode_host: str


def generate(scenario: Scenario, requests: int, seed: int) -> list[Arrival]:
    """Generate Poisson arrivals with evenly spread lengths.

    Equal seeds give equal runs.
    """
    random = Random(seed)
    if scenario.turns > 1:
        return _conversations(scenario, requests, random)
    at_s = 0.0
    made = []
    for _ in range(requests):
        at_s += random.expovariate(scenario.arrivals_per_s)
        prompt = random.randint(scenario.prompt_tokens_min, scenario.prompt_tokens_max)
        answer = random.randint(scenario.answer_tokens_min, scenario.answer_tokens_max)
        blocks: tuple[int, ...] = ()
        if scenario.prefix_groups:
            group = random.randrange(scenario.prefix_groups)
            count = min(scenario.prefix_tokens, prompt) // PREFIX_TOKENS
            blocks = tuple(group * (1 << 20) + block for block in range(count))
        made.append(Arrival(round(at_s * 1e9), prompt, answer, blocks))
    return made


def _conversations(scenario: Scenario, requests: int, random: Random) -> list[Arrival]:
    """Generate conversations, and return the first ``requests`` of all their turns.

    It generates as many conversations as may be needed.
    """
    started_s = 0.0
    turns: list[Arrival] = []
    for conversation in range(requests):
        started_s += random.expovariate(scenario.arrivals_per_s / scenario.turns)
        prompt = random.randint(scenario.prompt_tokens_min, scenario.prompt_tokens_max)
        for turn in range(scenario.turns):
            answer = random.randint(scenario.answer_tokens_min, scenario.answer_tokens_max)
            known, full = prompt // PREFIX_TOKENS, (prompt + answer) // PREFIX_TOKENS
            ids = tuple(conversation * (1 << 20) + block for block in range(full))
            at_ns = round((started_s + turn * scenario.turn_gap_s) * 1e9)
            turns.append(Arrival(at_ns, prompt, answer, ids[:known], ids[known:], conversation))
            prompt += answer + scenario.turn_tokens
    return sorted(turns, key=lambda turn: turn.at_ns)[:requests]


def read_azure(lines: Iterable[str]) -> list[Arrival]:
    """Read Azure's trace; times are relative to the first row. Raises ``TraceError``."""
    rows: list[Arrival] = []
    first: int | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("TIMESTAMP"):
            continue
        try:
            stamp, prompt, answer = text.split(",")
            whole, _, fraction = stamp.partition(".")
            seconds = round((datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds())
            at_ns = seconds * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
            first = at_ns if first is None else first
            rows.append(Arrival(at_ns - first, max(1, int(prompt)), max(1, int(answer))))
        except ValueError as error:
            raise TraceError(f"line {number}: {error}") from None
    return rows


def read_mooncake(lines: Iterable[str]) -> list[Arrival]:
    """Read Mooncake's trace. Raises ``TraceError``."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(int(block) for block in row["hash_ids"])
            rows.append(
                Arrival(
                    round(row["timestamp"] * 1e6), max(1, int(row["input_length"])), max(1, int(row["output_length"])), blocks
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"line {number}: {type(error).__name__}: {error}") from None
    return rows


def repeat(rows: Sequence[Arrival], requests: int, rate: float) -> list[Arrival]:
    """Return the first requests of a trace in order of time, ``rate`` times as fast.

    A trace with fewer than ``requests`` begins again.
    """
    if not rows:
        raise TraceError("it has no rows")
    ordered = sorted(rows, key=lambda row: row.at_ns)
    period_ns = ordered[-1].at_ns + max(1, ordered[-1].at_ns // len(ordered))
    made = []
    for index in range(requests):
        rounds, place = divmod(index, len(ordered))
        row = ordered[place]
        made.append(replace(row, at_ns=round((row.at_ns + rounds * period_ns) / rate)))
    return made


def plans(scenario: Scenario, arrivals: Sequence[Arrival], seed: int) -> list[WorkloadRequest]:
    """Give each request its hosts, as the scenario's ``routing`` says.

    They are drawn evenly, or each host in turn, which goes through all pairs.
    """
    hosts = scenario.hosts()
    prefills, decodes = len(hosts.prefill), len(hosts.decode)
    made = []
    for index, arrival in enumerate(arrivals):
        number = index if arrival.conversation is None else arrival.conversation
        if scenario.routing == "round-robin":
            first = number % prefills
            second = first if hosts.collocated else number // prefills % decodes
        else:
            second = int(uniform(seed, number, _DECODE) * decodes)
            first = second if hosts.collocated else int(uniform(seed, number, _PREFILL) * prefills)
        made.append(WorkloadRequest(index, arrival, hosts.prefill[first], hosts.decode[second]))
    return made
