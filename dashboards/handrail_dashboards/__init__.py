"""Grafana dashboards as code; filled by the on-call work."""
