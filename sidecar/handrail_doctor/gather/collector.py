"""Read clock offsets, traffic and transfer rates from a collector.

It reads plain JSON over the collector's HTTP API. A collector that does not answer is a reason, not an error.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import aiohttp

from handrail.security.tokens import OPEN, Access
from handrail_doctor.facts import ClockPair, ObservedTraffic
from handrail_doctor.gather.engines import reason

_MOST_BYTES: Final = 64 << 20
_ROWS: Final = 2000
_FEW: Final = 20
"""The least number of requests or hand-offs for a figure."""
_MINUTE_NS: Final = 60 * 10**9
_SMALL: Final = 1 << 20
"""The least bytes of a hand-off whose rate counts; a smaller one is all latency."""


async def ask_collector(
    api: str, timeout_s: float, access: Access = OPEN
) -> tuple[tuple[ClockPair, ...], ObservedTraffic | None, str]:
    """Return (clock pairs, traffic, the reason why pairs or everything is missing).

    ``api``: the collector's HTTP API.
    """
    base = api.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        connector = aiohttp.TCPConnector(ssl=access.context if access.context is not None else True)
        headers = access.headers
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False, connector=connector, headers=headers) as session:
            status = await _get(session, f"{base}/api/v1/status")
            requests = await _get(session, f"{base}/api/v1/requests?limit={_ROWS}")
            fetches = await _get(session, f"{base}/api/v1/fetches?limit={_ROWS}")
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        return (), None, f"no collector answers at {base}: {reason(error)}"
    if not isinstance(status, Mapping):
        return (), None, f"{base} answers, but is not a collector"
    pairs = clock_pairs(status, base)
    why = (
        ""
        if pairs
        else f"the collector at {base} knows no clock offset between two hosts: it saw only one host, or too few requests"
    )
    return pairs, traffic(_rows(requests, "requests"), _rows(fetches, "fetches"), base), why


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    """Fetch JSON.

    Raises ``ValueError`` for an answer that is not JSON, ``aiohttp.ClientError`` and ``OSError``.
    """
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status} for {url}")
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > _MOST_BYTES:
                raise ValueError(f"the answer of {url} is larger than {_MOST_BYTES >> 20} MiB")
            parts.append(part)
        return json.loads(b"".join(parts))


def clock_pairs(status: Mapping[str, Any], by: str) -> tuple[ClockPair, ...]:
    """Parse the ``clocks`` of ``GET /api/v1/status``."""
    found = []
    for each in _rows(status, "clocks"):
        source, target = each.get("from"), each.get("to")
        if isinstance(source, str) and isinstance(target, str):
            pair = ClockPair(source=source, target=target, low_ns=_whole(each, "low_ns"), high_ns=_whole(each, "high_ns"), by=by)
            found.append(pair)
    return tuple(found)


def traffic(requests: Sequence[Mapping[str, Any]], fetches: Sequence[Mapping[str, Any]], by: str) -> ObservedTraffic:
    """Compute figures over the rows of requests and hand-offs.

    Rows are newest first, as the API lists them.
    """
    starts = sorted(start for row in requests if (start := _whole(row, "started_unix_ns")) is not None)
    rate, burst = _rates(starts)
    rates = [
        moved / took * 1e9
        for row in fetches
        if row.get("outcome") == "ok"
        and (moved := _whole(row, "bytes_moved")) is not None
        and (took := _whole(row, "transfer_ns"))
        and moved >= _SMALL
    ]
    return ObservedTraffic(
        by=by,
        requests=len(requests),
        requests_per_s=rate,
        busiest_over_mean=burst,
        prompt_tokens=_median(_whole(row, "prompt_tokens") for row in requests),
        ttft_ns=_median(_whole(row, "ttft_token_ns") for row in requests),
        prefill_token_ns=_prefill_token_ns(requests),
        gap_p99_ns=_median(_whole(row, "gap_p99_ns") for row in requests),
        fetches=len(rates),
        fetch_bytes_per_s=statistics.median(rates) if len(rates) >= _FEW else None,
        split=bool(fetches) or any(_split(row) for row in requests),
    )


def _split(row: Mapping[str, Any]) -> bool:
    """Test whether P and D are two engines.

    Requests show this without the plugin too; hand-offs do not.
    """
    prefill, decode = row.get("prefill_instance"), row.get("decode_instance")
    return bool(prefill and decode) and prefill != decode


def _rates(starts: list[int]) -> tuple[float | None, float | None]:
    """Return requests a second, and the busiest minute over the mean one.

    The second figure needs at least three minutes.
    """
    if len(starts) < _FEW or starts[-1] <= starts[0]:
        return None, None
    seconds = (starts[-1] - starts[0]) / 1e9
    rate = (len(starts) - 1) / seconds
    minutes = Counter((start - starts[0]) // _MINUTE_NS for start in starts)
    return rate, max(minutes.values()) / (rate * 60) if seconds >= 180 else None


def _prefill_token_ns(requests: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the median over requests of prefill_compute per prompt token.

    Only tokens that no cache held count.
    """
    found = []
    for row in requests:
        phases = row.get("phases")
        computed = [
            took
            for phase in (phases if isinstance(phases, list) else ())
            if isinstance(phase, Mapping)
            and phase.get("phase") == "prefill_compute"
            and (took := _whole(phase, "duration_ns")) is not None
        ]
        tokens = (_whole(row, "prompt_tokens") or 0) - (_whole(row, "cached_tokens") or 0)
        if computed and tokens > 0:
            found.append(sum(computed) / tokens)
    return statistics.median(found) if len(found) >= _FEW else None


def _median(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if len(known) >= _FEW else None


def _rows(answer: Any, name: str) -> list[Mapping[str, Any]]:
    found = answer.get(name) if isinstance(answer, Mapping) else None
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _whole(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
