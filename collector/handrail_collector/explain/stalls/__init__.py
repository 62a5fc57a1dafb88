"""Explain stalls of streams."""
