"""What a process says of its certificates, its tokens and of whom it turned away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handrail import conventions as names
from handrail.auth import Guard
from handrail.selfmetrics import Row
from handrail.tls import Identity
from handrail.watched import Watched

Labelled = dict[tuple[str, ...], float]


def security_rows(watched: Sequence[Watched[Any]], guards: Sequence[Guard]) -> list[Row]:
    """Without TLS and tokens, rows that have no samples."""
    return [
        Row(
            f"{names.METRIC_TLS}_certificate_expiry_timestamp_seconds",
            "gauge",
            "When a certificate in use ends, in seconds since the epoch; of authorities, the first end",
            lambda: expiries(watched),
            ("use",),
        ),
        Row(
            f"{names.METRIC_SECRET}_reloads",
            "counter",
            "Changed certificates, keys and tokens: taken into use, or refused because they are not usable",
            lambda: _reloads(watched),
            ("use", "outcome"),
        ),
        Row(
            f"{names.METRIC_SECRET}_stale",
            "gauge",
            "1 while the process cannot use a changed file and keeps the previous content; the log gives the reason",
            lambda: {(each.use,): float(bool(each.refused)) for each in watched},
            ("use",),
        ),
        Row(
            f"{names.METRIC_AUTH}_refused_requests",
            "counter",
            "Requests refused: without the required token or client certificate, or with a wrong token",
            lambda: {(guard.listener,): float(guard.refused) for guard in guards if not guard.open},
            ("listener",),
        ),
    ]


def expiries(watched: Sequence[Watched[Any]]) -> Labelled:
    """Seconds since the epoch, by use."""
    identities = [each.value for each in watched if isinstance(each.value, Identity)]
    return {(use,): float(at) for identity in identities for use, at in identity.expiries.items()}


def _reloads(watched: Sequence[Watched[Any]]) -> Labelled:
    taken: Labelled = {(each.use, "taken"): float(each.reloads) for each in watched}
    return taken | {(each.use, "refused"): float(each.refusals) for each in watched}
