"""The phases of a request by the second observer.

They come from its notes, and use no figure of Handrail's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.client import Chunk, read_stream

SITE = Path(__file__).parent / "site"
DOOR = "kv_observer.Door"
VARIABLE = "KV_OBSERVER_LOG"
_LOADS = re.compile(r"start_load_kv for request (\S+) from")
_SEEN = re.compile(r"Finished recving KV transfer for request (\S+)")
_CONTACT = "NIXL handshake: add agent took"


@dataclass(frozen=True, slots=True)
class Transfer:
    """NIXL's telemetry of one transfer."""

    began_unix_ns: int
    took_ns: int
    bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Engine:
    """The notes of one engine's processes, by the client's request id.

    Moments are in ns on the host's wall clock.
    """

    arrived: dict[str, int] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)  # the first token's part went out, of a stream
    ended: dict[str, int] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    first_token: dict[str, int] = field(default_factory=dict)
    load_begun: dict[str, int] = field(default_factory=dict)
    load_seen: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    contacts: list[int] = field(default_factory=list)  # first contacts with a peer were over

    def prefill(self, name: str) -> dict[str, int]:
        """P's phases, ns."""
        return {
            "prefill_admission": self.queued[name] - self.arrived[name],
            "prefill_queue": self.scheduled[name] - self.queued[name],
            "prefill_compute": self.first_token[name] - self.scheduled[name],
            "prefill_respond": self.ended[name] - self.first_token[name],
        }

    def decode(self, name: str) -> dict[str, int]:
        """D's phases, in ns, of a streamed request.

        A known peer needs no handshake: the request waits until its transfer begins.
        """
        moved, begun = self.transfers[name], self.load_begun[name]
        done = moved.began_unix_ns + moved.took_ns
        met = any(begun <= at <= moved.began_unix_ns for at in self.contacts)
        waited_until = begun if met else moved.began_unix_ns
        return {
            "decode_admission": self.queued[name] - self.arrived[name],
            "kv_wait": waited_until - self.queued[name],
            "kv_handshake": moved.began_unix_ns - waited_until,
            "kv_transfer": moved.took_ns,
            "kv_notice": self.load_seen[name] - done,
            "decode_queue": self.scheduled[name] - self.load_seen[name],
            "first_step": self.first_token[name] - self.scheduled[name],
            "decode_respond": self.answered[name] - self.first_token[name],
        }


def read(path: Path, names: Iterable[str]) -> Engine:
    """The notes at ``path``.* about the requests that clients called ``names``."""
    found = Engine()
    wanted = tuple(names)
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        notes = [json.loads(line) for line in file.read_text().splitlines()]
        apart_ns = notes[0]["unix_ns"] - notes[0]["monotonic_ns"]
        for note in notes:
            _take(found, note, apart_ns, wanted)
        _match_transfers(found, [note for note in notes if note["what"] == "transfer"], apart_ns)
    return found


def _take(found: Engine, note: Mapping[str, Any], apart_ns: int, names: tuple[str, ...]) -> None:
    if note["what"] == "door":
        name = note["request_id"]
        found.arrived[name] = note["arrived_ns"] + apart_ns
        found.ended[name] = note["ended_ns"] + apart_ns
        token_ns = read_stream([Chunk(at_ns, text.encode()) for at_ns, text in note["parts"]]).ttft_token_ns
        if token_ns is not None:
            found.answered[name] = found.arrived[name] + token_ns
    elif note["what"] == "stamps":
        name = _client_id(note["request_id"], names)
        for moments, key in ((found.queued, "queued"), (found.scheduled, "scheduled"), (found.first_token, "first_token")):
            moments[name] = note[f"{key}_ns"] + apart_ns
    elif note["what"] == "line":
        if note["text"].startswith(_CONTACT):
            found.contacts.append(note["unix_ns"])
        for moments, pattern in ((found.load_begun, _LOADS), (found.load_seen, _SEEN)):
            if match := pattern.match(note["text"]):
                moments.setdefault(_client_id(match[1], names), note["unix_ns"])


def _client_id(raw: str, names: tuple[str, ...]) -> str:
    """``raw`` holds the client's id between what the engine puts before and after it."""
    return next((name for name in names if f"-{name}-" in f"{raw}-"), raw)


def _match_transfers(found: Engine, transfers: list[dict[str, Any]], apart_ns: int) -> None:
    """Match NIXL's transfers with requests by their order.

    NIXL's telemetry names no request. One thread begins the loads, so transfers begin in the order of its lines.
    Its times are of the monotonic clock, in us.
    """
    names = sorted(found.load_begun, key=lambda name: found.load_begun[name])
    for name, each in zip(names, sorted(transfers, key=lambda note: note["started_us"]), strict=False):
        began_ns = each["started_us"] * 1000 + apart_ns
        found.transfers[name] = Transfer(began_ns, round(each["took_us"] * 1000), each["bytes"], each["descriptors"])
