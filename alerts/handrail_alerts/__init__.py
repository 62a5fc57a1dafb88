"""SLO file to Prometheus rules; filled by the on-call work."""
