"""Correct impossible times in the plugin's datagrams, and count them.

The time of arrival bounds them.
Engine and sidecar share the host's clocks, so a datagram was sent just before it arrived, or was kept while no sidecar
listened. Other times come from damage, a clock that was set, or another machine's clock (a recording, a guest of a virtual
machine). All later stages wait by these times, so none of them may lie ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from operator import is_
from typing import Any, Final

from handrail.plugin import events as words
from handrail_sidecar.plugin_merge.bounds import SECOND_NS, Bounded
from handrail_sidecar.sources.datagram import Packet, PluginDatagramEvent

FUTURE: Final = "future"
OLD: Final = "old"
WALL: Final = "wall"
REASONS: Final = (FUTURE, OLD, WALL)
"""Why a time is impossible.

``future``: ahead of the arrival; ``old``: more than a day behind it; ``wall``: its wall clock is not that of this host.
"""

AHEAD_NS: Final = SECOND_NS
OLDEST_NS: Final = 86_400 * SECOND_NS  # a plugin keeps its events while no sidecar listens
WALL_APART_NS: Final = 60 * SECOND_NS
MAX_BOOTS: Final = 1024

BEGINS: Final = {
    words.STEP: "begin_ns",
    words.PAUSED: "begin_ns",
    words.KV_HANDSHAKE: "begin_ns",
    words.HTTP_HELD: "begin_ns",
    words.HTTP_REQUEST: "arrival_ns",
    words.ALIVE: "last_step_ns",
}
"""The field of an event that holds the monotonic time at which it began.

That time is no later than the event.
"""

_LONG_AGO: Final = frozenset({words.ALIVE})  # an idle engine may have stepped last a week ago


class Stamps:
    """Corrects datagrams.

    ``judged`` returns each datagram with possible times. ``displaced``: how many it changed, by reason.
    """

    def __init__(self) -> None:
        self.displaced: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        # offset that is added to the times of a boot whose clock is not this host's
        self._shifts: Bounded[int] = Bounded(MAX_BOOTS)

    def judged(self, packet: Packet, now_ns: int, now_unix_ns: int) -> Packet:
        """Return ``packet``, with corrected times if they are impossible.

        ``now_ns`` and ``now_unix_ns``: when it arrived.
        A datagram sent later than now, or more than a day ago, counts as sent now: all its times move together, and those of
        later datagrams of its boot by as much, so their distances stay. An event later than its datagram gets the datagram's
        time, one more than a day before it the time a day before. A wall clock that is a minute or more off is replaced by this
        host's.
        """
        shift = self._shift(packet, now_ns)
        sent_ns = packet.monotonic_ns + shift
        unix_ns = now_unix_ns - (now_ns - sent_ns)
        if abs(packet.unix_ns - unix_ns) > WALL_APART_NS:
            self.displaced[WALL] += 1
        else:
            unix_ns = packet.unix_ns
        turned_ns = unix_ns - packet.unix_ns
        events = tuple(
            self._event(plugin_datagram_event, shift, sent_ns, turned_ns, unix_ns - sent_ns)
            for plugin_datagram_event in packet.events
        )
        if not shift and not turned_ns and all(map(is_, events, packet.events)):
            return packet
        return replace(packet, monotonic_ns=sent_ns, unix_ns=unix_ns, events=events)

    def _shift(self, packet: Packet, now_ns: int) -> int:
        sent_ns = packet.monotonic_ns
        known = self._shifts.get(packet.boot)
        if known is None or abs(now_ns - sent_ns) < abs(now_ns - sent_ns - known) or not _can_be(sent_ns + known, now_ns):
            if _can_be(sent_ns, now_ns):
                self._shifts.pop(packet.boot, None)
                return 0
            known = now_ns - sent_ns
            self._shifts.put(packet.boot, known)
        self.displaced[FUTURE if sent_ns > now_ns else OLD] += 1
        return known

    def _event(
        self, plugin_datagram_event: PluginDatagramEvent, shift: int, sent_ns: int, turned_ns: int, offset_ns: int
    ) -> PluginDatagramEvent:
        at_ns = self._bounded(plugin_datagram_event.at_ns + shift, sent_ns)
        changed: dict[str, Any] = {}
        if (name := BEGINS.get(plugin_datagram_event.name)) is not None and (
            begin_ns := plugin_datagram_event.fields[name]
        ) is not None:
            begin = begin_ns + shift
            bounded = min(begin, at_ns) if plugin_datagram_event.name in _LONG_AGO else self._bounded(begin, at_ns)
            if bounded != begin_ns:
                changed[name] = bounded
        elif (
            plugin_datagram_event.name == words.QUEUED
            and (arrival := plugin_datagram_event.fields["arrival_unix_ns"]) is not None
        ):
            turned = arrival + turned_ns
            if not -OLDEST_NS <= turned - (at_ns + offset_ns) <= WALL_APART_NS:
                self.displaced[WALL] += 1
                changed["arrival_unix_ns"] = None
            elif turned_ns:
                changed["arrival_unix_ns"] = turned
        if at_ns == plugin_datagram_event.at_ns and not changed:
            return plugin_datagram_event
        fields: Mapping[str, Any] = {**plugin_datagram_event.fields, **changed} if changed else plugin_datagram_event.fields
        return PluginDatagramEvent(plugin_datagram_event.name, at_ns, fields)

    def _bounded(self, at_ns: int, latest_ns: int) -> int:
        if at_ns > latest_ns:
            if at_ns - latest_ns > AHEAD_NS:  # else threads that took turns
                self.displaced[FUTURE] += 1
            return latest_ns
        if latest_ns - at_ns > OLDEST_NS:
            self.displaced[OLD] += 1
            return latest_ns - OLDEST_NS
        return at_ns


def _can_be(sent_ns: int, now_ns: int) -> bool:
    return now_ns - OLDEST_NS <= sent_ns <= now_ns + AHEAD_NS
