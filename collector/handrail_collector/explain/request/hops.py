"""Split the time between processes into router time and hops.

With a router's spans no clocks are compared. Its own clock shows how long it worked before it called P, and when it called D;
P's own clock shows the part of that inside P. The router's work between P's answer and its call of D is part of
``prefill_hops``, because the ends of its client spans are unreliable.
Without such spans one part may be known: from the first token leaving D to the edge that sees it, where the clock bound of
the two hosts is narrow enough.
The parts sum to the whole exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from handrail.phases import Phase, PhaseTime, Place
from handrail.records import Exchange, Role, RouterCall
from handrail_collector.explain.request.path import Path
from handrail_collector.stitch.clocks import HostClocks

NARROW_NS: Final = 1_000_000
NARROW_SHARE: Final = 0.05
"""Widest bound of a part, as a share of all time between the processes.

A part is split off where its bound is within ``NARROW_NS`` or within this share.
"""

ROUNDING_NS: Final = 1_000


def parts(path: Path, between_ns: int, inside_p_ns: int | None, clocks: HostClocks) -> tuple[PhaseTime, ...]:
    """Return ``between_ns`` in parts; one part where no evidence splits it.

    ``inside_p_ns``: None without a prefill on the path.
    """
    found = _by_router(path, between_ns, inside_p_ns) or _by_clocks(path, between_ns, clocks)
    return found or (PhaseTime(Phase.ROUTER_AND_HOPS, between_ns, Place.PATH, "edge-proxy"),)


def _by_router(path: Path, between_ns: int, inside_p_ns: int | None) -> tuple[PhaseTime, ...]:
    server, to_p, to_d = _calls(path)
    first = to_p if inside_p_ns is not None else to_d
    if server is None or to_d is None or first is None:
        return ()
    router = first.start_unix_ns - server.start_unix_ns
    around_p = to_d.start_unix_ns - first.start_unix_ns - inside_p_ns if inside_p_ns is not None else 0
    rest = between_ns - router - around_p
    if min(router, around_p, rest) < 0:
        return ()  # spans of another attempt, or an unreliable end
    found = [PhaseTime(Phase.ROUTER, router, Place.PATH, "otlp", ROUNDING_NS)]
    if inside_p_ns is not None:
        found.append(PhaseTime(Phase.PREFILL_HOPS, around_p, Place.PATH, "otlp-proxy", ROUNDING_NS))
    return (*found, PhaseTime(Phase.DECODE_HOPS, rest, Place.PATH, "edge-proxy", ROUNDING_NS))


def _calls(path: Path) -> tuple[RouterCall | None, RouterCall | None, RouterCall | None]:
    """Return the router's server span, its last call of P and its last call of D.

    All are of one router; None where there is none, or several server spans.
    """
    servers = [call for call in path.calls if call.kind == "server"]
    if len(servers) != 1:
        return None, None, None
    own = [call for call in path.calls if call.process.instance == servers[0].process.instance and call.start_unix_ns > 0]
    return servers[0], _last(own, Role.PREFILL), _last(own, Role.DECODE)


def _last(calls: Sequence[RouterCall], phase: Role) -> RouterCall | None:
    return max((call for call in calls if call.phase is phase), key=lambda call: call.start_unix_ns, default=None)


def _by_clocks(path: Path, between_ns: int, clocks: HostClocks) -> tuple[PhaseTime, ...]:
    edge, d = path.edge, path.decode.exchange if path.decode is not None else None
    if edge is None or d is None:
        return ()
    seen, left = _first(edge), _first(d)
    if seen is None or left is None:
        return ()
    offset = clocks.between(edge.process.host, d.process.host, seen)
    if offset is None:
        return ()  # one host: the hop is too short to split off
    if offset.low_ns is None or offset.high_ns is None:
        return ()
    least, most = max(0, seen - left + offset.low_ns), min(between_ns, seen - left + offset.high_ns)
    if most < least or most - least > max(NARROW_NS, NARROW_SHARE * between_ns):
        return ()
    hops, bound = (least + most) // 2, (most - least + 1) // 2
    return (
        PhaseTime(Phase.ROUTER_AND_HOPS, between_ns - hops, Place.PATH, "edge-proxy", bound),
        PhaseTime(Phase.DECODE_HOPS, hops, Place.PATH, "clocks", bound),
    )


def _first(exchange: Exchange) -> int | None:
    """Return when the first token, or the whole response, left; by its host's clock."""
    if exchange.stream:
        return exchange.arrival_unix_ns + exchange.ttft_token_ns if exchange.ttft_token_ns is not None else None
    return exchange.arrival_unix_ns + exchange.duration_ns
