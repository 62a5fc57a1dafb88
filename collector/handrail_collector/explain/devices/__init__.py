"""Devices during a request or a period."""
