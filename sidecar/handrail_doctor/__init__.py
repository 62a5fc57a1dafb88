"""Checks of a prefill/decode pair before it gets traffic.

Gatherers collect facts, pure functions judge them, and each result has its reason.
"""
