"""Recognise what engines log about KV hand-offs."""
