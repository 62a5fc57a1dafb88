"""Gathers the facts that the checks judge."""
