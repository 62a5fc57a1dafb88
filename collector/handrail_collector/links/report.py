"""Combine each link's figures, transport and findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from handrail.device_counters.link import RECEIVE, TRANSMIT
from handrail_collector.links import facts
from handrail_collector.links.device_attribution import Carried, LinkFetches, carried
from handrail_collector.links.devices import DeviceCounts, Medium, alone
from handrail_collector.links.facts import LaneFacts, Posts, Queue
from handrail_collector.links.findings import SLOW, LinkFinding, findings
from handrail_collector.links.handoffs import EngineLink, Flow, HandOff, Piece
from handrail_collector.links.throughput import SECOND, LinkThroughput, by_link, figures
from handrail_collector.links.transport import TransportEvidence, transport_evidence
from handrail_collector.rows import LinkFactRow

NO_BOUND_NS: Final = SECOND
"""Assumed clock offset bound of two hosts whose clocks were never compared.

NTP keeps hosts within this time. It makes the windows wide.
"""

Offsets = Mapping[tuple[str, str], tuple[int | None, int | None]]
"""Bounds of the second host's wall clock minus the first's: least, most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLine:
    """One link.

    ``devices``: every device of its two hosts that was read.
    """

    figures: LinkThroughput
    transport: TransportEvidence
    findings: tuple[LinkFinding, ...]
    devices: tuple[DeviceCounts, ...]

    @property
    def share_of_line(self) -> float | None:
        """Rate while transferring over the line rate of the devices that carried it."""
        rate, line = self.figures.rate, self.transport.line_rate
        return rate / line if rate is not None and line else None

    @property
    def slow(self) -> bool:
        """Whether a finding says that the link is slow."""
        return any(finding.kind in SLOW for finding in self.findings)


def link_lines(
    hand_offs: Sequence[HandOff],
    devices: Iterable[DeviceCounts] = (),
    rows: Sequence[LinkFactRow] = (),
    offsets: Offsets | None = None,
    counted_posts: Sequence[Posts] = (),
) -> list[LinkLine]:
    """Report every link of ``hand_offs``, those with the most bytes first.

    ``counted_posts``: figures from metrics, which win over those from logs.
    """
    counters = _Counters(hand_offs, tuple(alone(devices)), offsets or {})
    evidence_source = _EvidenceSource(rows, counted_posts)
    lines = []
    for of_link in by_link(hand_offs).values():
        made = figures(of_link)
        link = made.link
        here = tuple(each for each in counters.devices if each.host in (link.producer_host, link.consumer_host))
        sent, received = (
            counters.of(host, way, link) for host, way in ((link.producer_host, TRANSMIT), (link.consumer_host, RECEIVE))
        )
        by = transport_evidence(link, sent, received, evidence_source.lanes)
        engines = (link.producer, link.consumer)
        found = findings(
            made,
            by,
            here,
            [each for each in evidence_source.posts if each.instance in engines],
            [each for each in evidence_source.queues if each.instance in engines],
            [each for each in evidence_source.no_gpu_get if each in engines],
        )
        lines.append(LinkLine(figures=made, transport=by, findings=found, devices=here))
    return sorted(lines, key=lambda line: (-line.figures.moved_bytes, line.figures.link.producer, line.figures.link.consumer))


class _EvidenceSource:
    """Evidence from the link facts, each kind computed once."""

    def __init__(self, rows: Sequence[LinkFactRow], counted_posts: Sequence[Posts]) -> None:
        self._rows = rows
        self._counted_posts = counted_posts

    @cached_property
    def lanes(self) -> list[LaneFacts]:
        return facts.lanes(self._rows)

    @cached_property
    def posts(self) -> list[Posts]:
        by_instance = {each.instance: each for each in (*facts.posts(self._rows), *self._counted_posts)}
        return list(by_instance.values())

    @cached_property
    def queues(self) -> list[Queue]:
        return facts.queues(self._rows)

    @cached_property
    def no_gpu_get(self) -> list[str]:
        return facts.no_gpu_get(self._rows)


@dataclass(frozen=True, slots=True)
class _End:
    """All fetches to or from one host, by that host's clock.

    ``links``: the index of the link of each piece.
    """

    flow: Flow
    links: Any
    doubt_ns: int


class _Counters:
    """The evidence of a host's counters for each of its links.

    All fetches to or from the host share its devices.
    """

    def __init__(self, hand_offs: Sequence[HandOff], devices: tuple[DeviceCounts, ...], offsets: Offsets) -> None:
        self.devices = devices
        self._offsets = offsets
        self._numbers: dict[EngineLink, int] = {}
        self._by_end: dict[tuple[str, str, bool], list[HandOff]] = {}
        self._ends: dict[tuple[str, str, bool], _End] = {}
        for one in hand_offs:
            if one.pieces:
                self._numbers.setdefault(one.link, len(self._numbers))
                for end in ((one.link.producer_host, TRANSMIT), (one.link.consumer_host, RECEIVE)):
                    self._by_end.setdefault((*end, one.link.one_host), []).append(one)

    def of(self, host: str, direction: str, link: EngineLink) -> list[Carried]:
        """Return what each medium of the host shows for the link.

        The loopback carries nothing between hosts.
        """
        devices = [each for each in self.devices if each.host == host and (link.one_host or each.medium is not Medium.LOOPBACK)]
        number, key = self._numbers.get(link), (host, direction, link.one_host)
        if not host or not devices or number is None:
            return []
        if key not in self._ends:
            self._ends[key] = self._end(host, self._by_end[key])
        end = self._ends[key]
        own = end.links == number
        return carried(LinkFetches(end.flow.only(own), end.flow.only(~own), end.doubt_ns), devices, host, direction)

    def _end(self, host: str, hand_offs: Sequence[HandOff]) -> _End:
        offsets: dict[str, tuple[int, int]] = {}
        pieces: list[Piece] = []
        links: list[int] = []
        shifts: list[int] = []
        for one in hand_offs:
            mover = one.link.producer_host if one.mode == "push" else one.link.consumer_host
            if mover not in offsets:
                offsets[mover] = self._offset(mover, host)
            pieces += one.pieces
            links += [self._numbers[one.link]] * len(one.pieces)
            shifts += [offsets[mover][0]] * len(one.pieces)
        flow, shift = Flow.of(pieces), np.array(shifts, np.int64)
        shifted = Flow(flow.begin_ns + shift, flow.end_ns + shift, flow.size, flow.bound_ns)
        return _End(shifted, np.array(links), max((width for _, width in offsets.values()), default=0))

    def _offset(self, of: str, host: str) -> tuple[int, int]:
        """Return what converts a time of ``of`` to a time of ``host``, and its bound."""
        if not of or of == host:
            return 0, 0
        low, high = self._offsets.get((of, host), (None, None))
        if low is None and high is None and (host, of) in self._offsets:
            behind = self._offsets[host, of]
            low, high = (None if each is None else -each for each in reversed(behind))
        if low is None or high is None:
            return 0, NO_BOUND_NS
        return (low + high) // 2, (high - low + 1) // 2
