"""Metrics of joined requests."""
