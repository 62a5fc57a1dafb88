"""Merge the events of one engine's processes into one record a request.

It does no I/O; the clocks come in.
"""
