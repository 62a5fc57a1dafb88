"""Truth lines of a run over real sockets, and the truth that they make together.

The fleet's processes write the lines with ``--truth FILE``; the client's lines are those of ``load``.
Times are true, in ns since the fleet's start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from handrail_sim.emulator.load import SentRequest
from handrail_sim.emulator.simulate import Attempt, Flight, truth_of
from handrail_sim.emulator.truth import FetchTruth, RequestTruth
from handrail_sim.emulator.workload import Arrival, WorkloadRequest

REFUSED = "refused"

_Line = TypeVar("_Line")


class WitnessError(ValueError):
    """These lines cannot be read; the message says which file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSaw:
    """One choice of one request at one engine.

    ``request_id``: the caller's name of it. ``reason``: vLLM's finish reason, or ``refused``.
    ``sent_ns``: when its first token, or its error, was written. ``end_ns``: when nothing of it was left at the engine.
    """

    host: str
    request_id: str
    publish: bool
    load: bool
    reason: str
    arrival_ns: int
    end_ns: int
    prompt_tokens: int
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    sent_ns: int | None = None
    answer_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    gaps_ns: tuple[int, ...] = ()
    load_started_ns: int | None = None
    contact_ns: int | None = None
    loaded_ns: int | None = None
    seen_ns: int | None = None
    kv_bytes: int = 0
    peer: str | None = None
    fetch: str = FetchTruth.NONE.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSaw:
    """One request at the router.

    ``sent_ids``: the ids that the engines got. ``thought_ns``: the time before anything was forwarded.
    """

    request_id: str
    sent_ids: tuple[str, ...]
    arrival_ns: int
    thought_ns: int
    end_ns: int
    status: int | None  # HTTP; None where the client left before there was one


class TruthFile:
    """A file with one JSON object a line, in the order in which requests end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, saw: EngineSaw | RouterSaw) -> None:
        self._file.write(json.dumps({"saw": type(saw).__name__, **asdict(saw)}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[EngineSaw | RouterSaw]:
    """Read the lines of one process. Raises ``WitnessError`` and ``OSError``."""
    kinds: dict[str, type[EngineSaw | RouterSaw]] = {"EngineSaw": EngineSaw, "RouterSaw": RouterSaw}
    return _lines(path, lambda fields: kinds[fields.pop("saw")](**fields))


def read_load(path: Path) -> list[SentRequest]:
    """Read the output of ``load``. Raises ``WitnessError`` and ``OSError``."""
    return _lines(path, lambda fields: SentRequest(**fields))


def _lines(path: Path, decode: Callable[[dict[str, Any]], _Line]) -> list[_Line]:
    """Decode the JSON lines of a file; a log may have other lines between them."""
    decoded = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.startswith("{"):
            continue
        try:
            fields = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
            decoded.append(decode(fields))
        except (ValueError, TypeError, KeyError) as error:
            raise WitnessError(f"{path} line {number}: {type(error).__name__}: {error}") from None
    return decoded


def truths(lines: Iterable[EngineSaw | RouterSaw], sent: Iterable[SentRequest], began_unix_ns: int) -> list[RequestTruth]:
    """Build the truth of each request that the router passed to a prefill host.

    They are in the order of the requests' numbers in ``sent``.
    Hops are the time that no process had: that of the sockets, and of the engines' and the router's own work around the model.
    """
    routed: dict[str, RouterSaw] = {}
    engines: dict[str, list[EngineSaw]] = {}
    for line in lines:
        if isinstance(line, RouterSaw):
            routed[line.request_id] = line
        else:
            engines.setdefault(line.request_id, []).append(line)
    made = []
    for client in sorted(sent, key=lambda each: each.index):
        router = routed.get(client.request_id)
        if router is None:
            continue
        met = sorted((line for name in dict.fromkeys(router.sent_ids) for line in engines.get(name, ())), key=_arrival)
        flight = _flight(client, router, met, began_unix_ns)
        if flight is not None:
            made.append(replace(truth_of(flight, None), request_id=client.request_id))
    return made


def _arrival(line: EngineSaw) -> int:
    return line.arrival_ns


def _flight(client: SentRequest, router: RouterSaw, met: list[EngineSaw], began_unix_ns: int) -> Flight | None:
    """Join the lines of one request; None where no engine has a line."""
    prefills = [line for line in met if line.publish]
    prefill = next((line for line in reversed(prefills) if line.reason != REFUSED), None)
    decode = next((line for line in reversed(met) if line.load), None)
    last = prefill or (prefills[-1] if prefills else None)
    if last is None:
        return None
    at_ns = client.started_unix_ns - began_unix_ns
    plan = WorkloadRequest(
        client.index,
        Arrival(at_ns, last.prompt_tokens, decode.answer_tokens if decode is not None else 0),
        last.host,
        decode.host if decode is not None else "",
    )
    flight = Flight(plan, router_ns=router.thought_ns - router.arrival_ns, failed=client.error is not None)
    flight.abandoned = [Attempt(line.host, line.arrival_ns, line.end_ns) for line in prefills if line.reason == REFUSED]
    if prefill is not None:
        flight.cached_tokens = prefill.cached_tokens
        flight.prefill_arrival_ns, flight.prefill_queued_ns = prefill.arrival_ns, prefill.queued_ns
        flight.prefill_scheduled_ns, flight.prefill_first_ns = prefill.scheduled_ns, prefill.first_token_ns
        flight.prefill_done_ns = prefill.end_ns
    if decode is not None:
        _decoded(flight, decode)
    ttft_ns = client.ttft_token_ns
    flight.edge_first_ns = at_ns + ttft_ns if ttft_ns is not None else None
    flight.end_ns = at_ns + client.duration_ns
    if flight.sent_ns is None:
        flight.sent_ns = last.end_ns if decode is None else decode.end_ns
    return flight


def _decoded(flight: Flight, decode: EngineSaw) -> None:
    flight.kv_bytes = decode.kv_bytes
    flight.decode_arrival_ns, flight.decode_queued_ns = decode.arrival_ns, decode.queued_ns
    flight.load_started_ns, flight.contact_ns = decode.load_started_ns, decode.contact_ns
    flight.loaded_ns, flight.seen_ns = decode.loaded_ns, decode.seen_ns
    flight.decode_scheduled_ns = decode.scheduled_ns
    flight.first_token_ns, flight.last_token_ns = decode.first_token_ns, decode.last_token_ns
    flight.sent_ns, flight.engine_end_ns = decode.sent_ns, decode.end_ns
    flight.gaps_ns, flight.preemptions = list(decode.gaps_ns), decode.preemptions
    flight.fetch = FetchTruth(decode.fetch)
