"""Define the metrics of GPU and link samples on their way to the collector."""

from __future__ import annotations

from handrail import conventions as names
from handrail.metrics.registry import MetricDef, by_label
from handrail_sidecar.export.device_batches import DeviceBatches


def device_rows(batches: DeviceBatches) -> list[MetricDef]:
    """Return the metrics of ``export/device_batches.py``."""
    prefix, stats = f"{names.METRIC_SIDECAR}_device_samples", batches.stats

    def dropped() -> dict[str, int]:
        return {"overrun": stats.overrun, "no_room": stats.no_room, "rejected": stats.rejected, "fault": stats.faults}

    return [
        MetricDef(prefix, "counter", "Samples of GPUs and links accepted", lambda: stats.taken),
        MetricDef(f"{prefix}_sent", "counter", "Samples passed to the exporter", lambda: stats.sent),
        MetricDef(
            f"{prefix}_dropped",
            "counter",
            "Samples that the sidecar did not send: more than a batch holds; the spool has room for requests only; never "
            "fits; a fault of Handrail",
            lambda: by_label(dropped()),
            ("reason",),
        ),
    ]
