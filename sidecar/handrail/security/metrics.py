"""Metrics of a process's certificates, tokens and refused clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handrail import conventions as names
from handrail.metrics.registry import MetricDef
from handrail.security.file_reload import ReloadingFile
from handrail.security.tls import TlsMaterial
from handrail.security.tokens import Authenticator

Labelled = dict[tuple[str, ...], float]


def security_rows(watched: Sequence[ReloadingFile[Any]], guards: Sequence[Authenticator]) -> list[MetricDef]:
    """Rows of security metrics; without TLS and tokens they have no samples."""
    return [
        MetricDef(
            f"{names.METRIC_TLS}_certificate_expiry_timestamp_seconds",
            "gauge",
            "When a certificate in use ends, in seconds since the epoch; of authorities, the first end",
            lambda: expiries(watched),
            ("use",),
        ),
        MetricDef(
            f"{names.METRIC_SECRET}_reloads",
            "counter",
            "Changed certificates, keys and tokens: taken into use, or refused because they are not usable",
            lambda: _reloads(watched),
            ("use", "outcome"),
        ),
        MetricDef(
            f"{names.METRIC_SECRET}_stale",
            "gauge",
            "1 while the process cannot use a changed file and keeps the previous content; the log gives the reason",
            lambda: {(each.use,): float(bool(each.refused)) for each in watched},
            ("use",),
        ),
        MetricDef(
            f"{names.METRIC_AUTH}_refused_requests",
            "counter",
            "Requests refused: without the required token or client certificate, or with a wrong token",
            lambda: {(guard.listener,): float(guard.refused) for guard in guards if not guard.open},
            ("listener",),
        ),
    ]


def expiries(watched: Sequence[ReloadingFile[Any]]) -> Labelled:
    """Expiry times in seconds since the epoch, by use."""
    identities = [each.value for each in watched if isinstance(each.value, TlsMaterial)]
    return {(use,): float(at) for identity in identities for use, at in identity.expiries.items()}


def _reloads(watched: Sequence[ReloadingFile[Any]]) -> Labelled:
    taken: Labelled = {(each.use, "taken"): float(each.reloads) for each in watched}
    return taken | {(each.use, "refused"): float(each.refusals) for each in watched}
