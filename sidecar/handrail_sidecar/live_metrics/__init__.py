"""Requests counted as they happen, for the sidecar's /metrics: what alerts look at while the collector still stitches."""
