"""Explain a period: baselines, causes, tail."""
