"""Serve the sidecar's /metrics: live counts of requests, devices and own work.

Requests are counted as they happen; alerts use these counts while the collector still stitches.
"""
