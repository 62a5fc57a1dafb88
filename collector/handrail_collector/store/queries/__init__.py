"""Queries of the store."""
